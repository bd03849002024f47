"""The Chainer link and create_mnbn_model in one process."""

import copy
import pickle
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L

from multibn import SingleProcess, as_communicator
from multibn.chainer_backend import MultiNodeBatchNormalization, step_statistics
from multibn.parity.oracle import relative_error
from tests.helpers.ranks import (
    CountingCommunicator,
    ThreadCommunicator,
    errors_of_rank_0,
    run_ranks,
)

LOCAL = SingleProcess()


def train(link: Any, x: Any, dy: Any, **arguments: Any) -> list[Any]:
    link.cleargrads()
    v = chainer.Variable(x)
    y = link(v, **arguments)
    y.grad = dy
    y.backward()
    return [y.array, v.grad, *(p.grad for _, p in sorted(link.namedparams()))]


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 5, 3), (6, 4, 2, 5, 3)])
def test_alone_it_is_chainers_batch_normalization(shape: tuple[int, ...], finetune: bool) -> None:
    rng = np.random.default_rng(0)
    theirs = L.BatchNormalization(4, dtype=np.float64, initial_avg_var=0)
    ours = MultiNodeBatchNormalization(4, LOCAL, dtype=np.float64)
    for _ in range(3):
        x, dy = rng.normal(size=shape), rng.normal(size=shape)
        for a, b in zip(
            train(ours, x, dy, finetune=finetune),
            train(theirs, x, dy, finetune=finetune),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    assert ours.N == theirs.N
    np.testing.assert_allclose(ours.avg_mean, theirs.avg_mean)
    np.testing.assert_allclose(ours.avg_var, theirs.avg_var)
    with chainer.using_config("train", False):
        np.testing.assert_allclose(ours(x).array, theirs(x).array, rtol=1e-10)


@pytest.mark.parametrize(
    "x, options, kind, message",
    [
        (np.ones(4), {}, ValueError, r"at least 2 dimensions and.*got shape \(4,\)"),
        (np.ones((2, 2, 4)), {}, ValueError, r"\(3,\), the link's `size`: got \(2,\) in shape"),
        (np.ones((2, 3), int), {}, TypeError, "real floating-point dtype: got int"),
        (None, {}, TypeError, "must be a Variable or an array: got NoneType"),
        ([[1.0]], {}, TypeError, "must be a Variable or an array: got list"),
        (chainer.Variable(), {}, TypeError, "or an array: got Variable without an array"),
        (np.ma.ones((2, 3)), {}, TypeError, "must be a plain array: got MaskedArray. Pass numpy"),
        (np.ones((4, 3)), {"axis": (0, 2)}, ValueError, r"to reduce, \(0, 2\): got"),
    ],
)
def test_a_wrong_input_on_one_rank_is_an_error_on_all(
    x: Any, options: Any, kind: Any, message: str
) -> None:
    """It is one for the rank alone in evaluation."""

    def call(wrong: bool, communicator: Any) -> None:
        link = MultiNodeBatchNormalization(**{"size": 3, "comm": communicator, **options})
        link(x if wrong else np.ones((2, 3, 5)))

    errors_of_rank_0(call, kind, message)
    with chainer.using_config("train", False), pytest.raises(kind, match=message):
        call(True, LOCAL)


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize(
    "name, value, message",
    [
        ("eps", -1.0, "`eps` must be in"),
        ("decay", 3.0, "`decay` must be in"),
        ("nonfinite", "x", "`nonfinite` must be one of"),
        ("gamma", np.ones(1), r"`gamma` must have shape \(3,\), .*: got shape \(1,\) in float64"),
        ("gamma", np.ones((3, 1)), r"`gamma` must .*: got shape \(3, 1\) in float64"),
        ("beta", np.ones(3, int), r"`beta` must .* in floating point: got shape \(3,\) in int64"),
        ("gamma", chainer.Parameter(), r"`gamma` must .*: got NoneType"),
        ("avg_var", np.ones(3, int), r"`avg_var` must .*: got shape \(3,\) in int64"),
        ("avg_mean", [0.0] * 3, r"`avg_mean` must .*: got list"),
        ("avg_var", None, r"`avg_var` must .*: got NoneType"),
    ],
)
def test_what_is_set_later_on_one_rank_is_refused_on_all(
    name: str, value: Any, message: str, finetune: bool
) -> None:
    """The next call raises before its message, with a plan for such inputs or without one."""

    def call(wrong: bool, communicator: ThreadCommunicator) -> None:
        link, x = MultiNodeBatchNormalization(3, communicator, dtype="d"), np.eye(4, 3)
        for _ in range(2):
            link(x, finetune)
        if wrong and name in ("gamma", "beta") and isinstance(value, np.ndarray):
            getattr(link, name).array = value
        elif wrong:
            setattr(link, name, value)
        link(x, finetune)

    errors_of_rank_0(call, ValueError, message)


def test_deepcopy_keeps_the_communicator_and_honours_the_memo() -> None:
    a = MultiNodeBatchNormalization(3, LOCAL)
    b: Any = MultiNodeBatchNormalization(3, LOCAL, use_gamma=False)
    with b.init_scope():
        b.gamma = a.gamma
    before = dict(a.__dict__)
    a2, b2 = copy.deepcopy([a, b])
    assert a2.gamma is b2.gamma
    assert a2.gamma is not a.gamma
    assert a2.comm is a.comm is LOCAL
    assert before == a.__dict__
    assert pickle.loads(pickle.dumps(a)).comm.size == 1
    assert a.copy("share").comm is a.copy("copy").comm is LOCAL


def test_the_communicator_can_be_assigned() -> None:
    link = MultiNodeBatchNormalization(3, LOCAL)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("f")
    link(x)
    counting = CountingCommunicator(LOCAL)
    link.comm = counting
    assert link.comm is counting
    link(x)
    assert link.layer_communicator.communicator is counting
    # as ChainerMN's __deepcopy__ and those who pickle its link
    link.comm, comm = None, link.comm
    loaded = pickle.loads(pickle.dumps(link))
    loaded.comm = link.comm = comm
    assert link.comm is loaded.comm is counting
    link.comm = None
    assert link.comm is MultiNodeBatchNormalization(3, None).comm is as_communicator(None)
    with pytest.raises(TypeError, match="a communicator must be None"):
        link.comm = "mpi"
    assert link.comm is as_communicator(None)


def test_bad_arguments_are_refused() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"size": (3, -1)}, ValueError, "`size` must be positive: got -1"),
        ({"axis": -1}, ValueError, "`axis` must be 0 or more: got -1"),
        ({"axis": (0, 2.0)}, TypeError, "`axis` must be an int: got 2.0 of type float"),
        ({"axis": ()}, ValueError, r"`axis` must have 1 or more axes, .* below 1, .*: got \(\)\. "),
        ({"axis": (0, 0)}, ValueError, r"each once and below 3, .* `size`: got \(0, 0\)\. None r"),
        ({"axis": 2}, ValueError, r"below 2, the number of axes of an input .*: got 2\. None red"),
        ({"decay": 1.1}, ValueError, r"`decay` must be in \[0, 1\]: got 1.1"),
        ({"dtype": "i"}, TypeError, "`dtype` must be a real floating-point dtype: got 'i'"),
        ({"initial_beta": np.ones(7)}, ValueError, "broadcast"),
        ({"communication_backend": "nccl"}, ValueError, "needs ChainerMN's pure_nccl comm"),
        ({"communication_backend": "ib"}, ValueError, "one of 'mpi', 'nccl', 'auto': got 'ib'"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            MultiNodeBatchNormalization(**{"size": 3, "comm": LOCAL, **options})


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize(
    "sizes", [[(4, 2)], [(1, 3), (3, 0)], [(1, 1), (2, 5), (0, 3), (1, 2), (4, 1)]]
)
def test_a_step_of_micro_batches_equals_one_batch(
    sizes: list[tuple[int, int]], finetune: bool
) -> None:
    """`step_statistics` moves the averages as one batch does, with forgotten blocks, too."""
    rng = np.random.default_rng(0)
    steps = [[rng.normal(3, 2, (sum(n), 4, 3)) for n in sizes] for _ in range(2)]

    def train_link(communicator: ThreadCommunicator) -> Any:
        link = MultiNodeBatchNormalization(4, communicator, dtype=np.float64)
        model = chainer.Sequential(link)
        for step in steps:
            with step_statistics(model), step_statistics(link):
                for x, n in zip(step, sizes, strict=True):
                    part = np.split(x, [n[0]])[communicator.rank]
                    v = chainer.Variable(part)
                    y = F.forget(lambda v: link(v, finetune=finetune), v)
                    F.sum(y * y).backward()
                assert not link.avg_mean.any() or step is steps[1]
        return link

    expected = MultiNodeBatchNormalization(4, LOCAL, dtype=np.float64)
    for step in steps:
        expected(np.concatenate(step), finetune=finetune)
    for link in run_ranks(2, train_link):
        assert relative_error(link.avg_mean, expected.avg_mean) < 1e-12
        assert relative_error(link.avg_var, expected.avg_var) < 1e-12
        assert link.N == expected.N


def test_a_step_moves_arrays_that_were_replaced_inside_of_it() -> None:
    link, expected = (MultiNodeBatchNormalization(4, LOCAL, dtype=np.float64) for _ in "ab")
    x = np.random.default_rng(0).normal(size=(3, 4))
    with step_statistics(link):
        link(x)
        link.avg_mean, link.avg_var = link.avg_mean.copy(), link.avg_var.copy()
    expected(x)
    assert relative_error(link.avg_mean, expected.avg_mean) < 1e-12
    assert relative_error(link.avg_var, expected.avg_var) < 1e-12


def test_a_step_that_fails_or_has_no_batch_changes_nothing() -> None:
    link = MultiNodeBatchNormalization(4, LOCAL)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("f")
    with pytest.raises(ValueError, match="must have channels of shape"), step_statistics(link):
        link(link(x)[:, :3])
    with step_statistics(link):
        copy.deepcopy(link)(x)  # a copy has no part in the step
    assert not link.avg_mean.any()
    link(x)  # the step is over
    assert link.avg_mean.all()
    with (
        pytest.raises(ValueError, match="`model` must have a multi-node link: got none in Linear"),
        step_statistics(L.Linear(2)),
    ):
        pass
