"""The Chainer link and create_mnbn_model in one process."""

import copy
import math
import pickle
import warnings
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L

from multibn import SingleProcess, as_communicator
from multibn.chainer_backend import (
    MultiNodeBatchNormalization,
    create_mnbn_model,
    step_statistics,
)
from multibn.communicators import nonfinite as _nonfinite
from multibn.parity.oracle import relative_error
from tests.helpers.ranks import (
    CountingCommunicator,
    ThreadCommunicator,
    errors_of_rank_0,
    run_ranks,
)

LOCAL = SingleProcess()

X = np.zeros((4, 3, 7))


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
        (X, {"mask": X == 0}, ValueError, r"\(4, 7\), or .* got \(4, 3, 7\)"),
        (X, {"mask": chainer.Variable(X[:, 0])}, TypeError, "`mask` must .* got Variable"),
        (X, {"lengths": np.array([1, 8, 1, 1])}, ValueError, "from 0 to 7, .* got 8 for sample 1"),
        (X, {"residual": X[..., :1]}, ValueError, r"the shape and dtype of the input, \(4, 3, 7\)"),
        (X, {"residual": X.astype("f")}, ValueError, r"got \(4, 3, 7\) and float32"),
        (X, {"residual": 1.0}, TypeError, "`residual` must be a Variable or an array: got float"),
    ],
)
def test_a_wrong_input_on_one_rank_is_an_error_on_all(
    x: Any, options: Any, kind: Any, message: str
) -> None:
    """It is one for the rank alone in evaluation."""

    def call(wrong: bool, communicator: Any) -> None:
        of_link = {"axis": options["axis"]} if "axis" in options else {}
        link = MultiNodeBatchNormalization(3, communicator, **of_link)
        given = {} if of_link or not wrong else options
        link(x if wrong else np.ones((2, 3, 5)), **given)

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


# With a ReLU, and with an addition before: see test_second_order.py for gradients.


def link_of(**options: Any) -> Any:
    options |= {"initial_gamma": np.array([1.5, -0.5, 1]), "initial_beta": np.arange(3.0)}
    return MultiNodeBatchNormalization(3, LOCAL, dtype=np.float64, **options)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [None, np.asarray([5, 2, 0, 4])], ids=["all", "lengths"])
def test_a_fused_pass_equals_separate_functions(relu: bool, training: bool, lengths: Any) -> None:
    x, residual = np.random.default_rng(1).normal(size=(2, 4, 3, 5))
    apart, fused = link_of(), link_of(fuse_relu=relu)
    with chainer.using_config("train", training):
        expected = apart(x, lengths=lengths).array + residual
        y = fused(x, residual=residual, lengths=lengths).array
    expected = np.maximum(expected, 0) if relu else expected
    if lengths is not None:
        expected = np.where(np.arange(5) < lengths[:, None, None], expected, 0)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(fused.avg_var, apart.avg_var)


def test_gradients_have_the_dtypes_of_their_parameters() -> None:
    """A residual in half precision is the node's last input."""
    link = MultiNodeBatchNormalization(3, LOCAL, dtype=np.float32, fuse_relu=True)
    x, residual = (chainer.Variable(np.ones((4, 3, 5), np.float16)) for _ in range(2))
    y = link(x, residual=residual)
    F.sum(y * y).backward(enable_double_backprop=True)
    assert link.gamma.grad.dtype == link.beta.grad.dtype == np.float32
    assert x.grad.dtype == residual.grad.dtype == np.float16


def test_the_node_has_what_an_exporter_reads_or_says_why_not() -> None:
    """onnx_chainer knows the node by Chainer's name, and reads `axis` and `eps` in training."""
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype("f")
    link = MultiNodeBatchNormalization(3, None, eps=0.1)
    node = link(x).creator_node
    assert (type(node).__name__, node.axis, node.eps) == ("BatchNormalization", (0, 2), 0.1)
    fused = MultiNodeBatchNormalization(3, None, fuse_relu=True)
    for y in (fused(x), link(x, residual=x), link(x, lengths=np.full(4, 3))):
        with pytest.raises(NotImplementedError, match=r"a ReLU inside\. Export .* train=False"):
            y.creator_node.axis  # noqa: B018


# Batches that are not finite.


def _averages(link: Any) -> list[Any]:
    return [link.avg_mean.copy(), link.avg_var.copy(), link.N]


@pytest.mark.filterwarnings("ignore:rank . of 2 has skipped:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")
@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("dtype, nonfinite", [(np.float16, None), (np.float32, "skip")])
def test_all_later_steps_are_those_without_the_batch(
    dtype: Any, nonfinite: Any, finetune: bool
) -> None:
    def results(communicator: Any, sees: bool) -> list[Any]:
        counting = CountingCommunicator(communicator)
        link = MultiNodeBatchNormalization(3, counting, dtype=np.float32, nonfinite=nonfinite)
        rng, found = np.random.default_rng(communicator.rank), []
        for step in range(4):
            x = chainer.Variable(rng.normal(size=(4, 3)).astype(dtype))
            if step == 2:
                if not sees:
                    continue
                x.array[0, 1] = [1, np.inf][communicator.rank]
            before, num_messages = _averages(link), len(counting.messages)
            y = link(x, finetune=finetune)
            y.grad = np.ones_like(y.array)
            y.backward()
            if step == 2:
                assert np.isnan(y.array).all()
                assert np.isnan(x.grad).all()
                np.testing.assert_equal(_averages(link), before)
                assert len(counting.messages) - num_messages == 2
            else:
                found += [y.array, x.grad, *_averages(link)]
        return found

    saw, never_saw = (run_ranks(2, lambda c, s=s: results(c, s)) for s in (True, False))  # type: ignore[misc]
    np.testing.assert_equal(saw, never_saw)


def test_nonfinite_says_whether_a_link_skips_or_raises() -> None:
    x = np.ones((4, 3), np.float32) * np.arange(4, dtype="f")[:, None]
    x[0, 0] = np.inf
    model = chainer.Sequential(chainer.Sequential(L.BatchNormalization(3)))
    converted: Any = create_mnbn_model(model, LOCAL, nonfinite="skip")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow|invalid value", RuntimeWarning)
        _nonfinite._warned_at = -math.inf
        text = "rank 0 of 1 has skipped a batch in layer 0.0,"
        with pytest.warns(RuntimeWarning, match=text) as caught:
            assert np.isnan(converted(x).array).all()
        assert caught[0].filename == __file__  # not a line of multibn's or Chainer's
        raising = MultiNodeBatchNormalization(3, LOCAL, nonfinite="raise")
        for link, v in ((raising, x.astype("e")), (MultiNodeBatchNormalization(3, None), x)):
            with pytest.raises(FloatingPointError, match="are not finite"):
                link(v)
