"""Fine-tuning of population statistics, in one process and over ranks as threads."""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from tests.helpers import require
from tests.helpers.ranks import CountingCommunicator, ThreadCommunicator, run_ranks

require.need("chainer")

from multibn.chainer_backend import (  # noqa: E402
    FinetunePopulationStatistics,
    MultiNodeBatchNormalization,
    finetune_population_statistics,
)

import chainer  # noqa: E402  # isort: skip (multibn makes it importable)
from chainer import functions as F, links as L  # noqa: E402  # isort: skip

C = 3
ALONE = SingleProcess()


def plain() -> Any:
    return L.BatchNormalization(C, dtype=np.float64)


def shared(communicator: Any = ALONE) -> Any:
    return MultiNodeBatchNormalization(C, communicator, dtype=np.float64)


class Net(chainer.Chain):
    """Two norms, dropout, a persistent value of another kind, and a report of the loss."""

    def __init__(self, make: Any = shared) -> None:
        super().__init__()
        with self.init_scope():
            self.a = make()
            self.b = make()
            self.unused = make()
        self.calls = np.zeros(1)
        self.register_persistent("calls")

    def forward(self, x: Any) -> Any:
        self.calls += 1
        h = F.dropout(self.b(F.relu(self.a(x)) ** 2))
        chainer.report({"loss": F.sum(h)}, self)
        return h


def batches(sizes: Any = (4, 6, 1), seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(i, 1 + i, (n, C, 2 + i)) for i, n in enumerate(sizes)]


def rows(xs: list[Any]) -> Any:
    return np.concatenate([np.moveaxis(x, 1, 0).reshape(x.shape[1], -1) for x in xs], axis=1)


def state(link: Any) -> dict[str, Any]:
    return {
        f"{name}/{p}": copy.deepcopy(child.__dict__[p])
        for name, child in link.namedlinks()
        for p in sorted(child._persistent)
    }


def assert_same(a: dict[str, Any], b: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if not name.startswith(but or ("nothing",)):
            np.testing.assert_array_equal(b[name], value, err_msg=name)


def inputs_of(model: Any, link: str, data: list[Any]) -> list[Any]:
    seen: list[Any] = []

    class Spy(chainer.LinkHook):
        def forward_preprocess(self, args: Any) -> None:
            seen.append(chainer.as_array(args.args[0]))

    other = copy.deepcopy(model)
    other[link].add_hook(Spy())
    for x in data:
        other(x)
    return seen


def assert_population(link: Any, xs: list[Any]) -> None:
    np.testing.assert_allclose(link.avg_mean, rows(xs).mean(1), rtol=1e-10)
    np.testing.assert_allclose(link.avg_var, rows(xs).var(1, ddof=1), rtol=1e-10)


def finetune(iterator: Any, target: Any, comm: Any = None, **options: Any) -> None:
    options = {"converter": None, "progress": False} | options
    finetune_population_statistics(iterator, target, comm, **options)


@pytest.mark.parametrize("make", [plain, shared])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_population_of_unequal_batches(make: Any, num_passes: int) -> None:
    """Where Chainer's own fine-tuning is off: batches of 4, 6 and 1 examples of unequal sizes."""
    model, data = Net(make), batches()
    model(data[0])
    before = state(model)
    second = inputs_of(model, "b", data)
    random_state: Any = np.random.get_state()  # noqa: NPY002
    with chainer.using_config("train", False):
        finetune(data, model, num_passes=num_passes)
        assert not chainer.config.train
    for old, new in zip(random_state, np.random.get_state(), strict=True):  # noqa: NPY002
        np.testing.assert_array_equal(old, new)
    assert_population(model.a, data * num_passes)
    assert_population(model.b, second * num_passes)
    assert model.a.N == model.b.N == 3 * num_passes
    assert_same(before, state(model), but=("/a/", "/b/"))


def test_chainers_own_finetuning_differs() -> None:
    """The negative control."""
    link, data = plain(), batches()
    for x in data:
        link(x, finetune=True)
    assert np.abs(link.avg_mean / rows(data).mean(1) - 1).max() > 0.05
    assert np.abs(link.avg_var / rows(data).var(1, ddof=1) - 1).max() > 0.05


def test_axes() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, C))
    for link in (
        L.BatchNormalization(C, axis=(0, 1), dtype=np.float64),
        MultiNodeBatchNormalization(C, ALONE, axis=(0, 1), dtype=np.float64),
        MultiNodeBatchNormalization((5, C), ALONE, dtype=np.float64),
    ):
        finetune([x], link)
        reduced = tuple(range(3 - link.avg_mean.ndim))
        np.testing.assert_allclose(link.avg_mean, x.mean(reduced))
        np.testing.assert_allclose(link.avg_var, x.var(reduced, ddof=1))


def test_a_shared_link_sees_all_its_inputs() -> None:
    link, data = shared(), batches()
    finetune(data, link, eval_func=lambda x: link(link(x) + 1))
    assert link.N == 6
    other = shared()
    assert_population(link, data + [other(x).array + 1 for x in data])


def test_finetune_argument_of_the_model_changes_nothing() -> None:
    a, b = shared(), shared()
    finetune(batches(), a)
    finetune(batches(), b, eval_func=lambda x: b(x, finetune=True))
    assert_same(state(a), state(b))


class Interrupted:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield batches()[0]
        raise self.error


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
@pytest.mark.parametrize("in_model", [True, False])
def test_an_error_leaves_everything_as_it_was(error: BaseException, in_model: bool) -> None:
    model = Net()
    model(batches()[0])
    model.a.N = 7
    before = state(model)

    def fail(x: Any) -> None:
        model(x)
        raise error

    with chainer.using_config("train", False):
        data: Any = batches() if in_model else Interrupted(error)
        with pytest.raises(type(error)):
            finetune(data, model, eval_func=fail if in_model else None)
        assert not chainer.config.train
    assert chainer.config.enable_backprop
    assert_same(before, state(model))
    finetune(batches(), model)  # no hook was left behind


def dataset() -> Any:
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(10, C)).astype("f")
    return chainer.datasets.TupleDataset(xs, np.arange(10, dtype=np.int32) % C), xs


@pytest.mark.parametrize("kind", ["SerialIterator", "MultithreadIterator"])
def test_iterators_and_classifiers(kind: str) -> None:
    pairs, xs = dataset()
    iterator = getattr(chainer.iterators, kind)(pairs, 4, repeat=False)
    model = L.Classifier(chainer.Sequential(L.BatchNormalization(C), F.relu))
    for _ in range(2):  # an iterator that was used up is reset
        finetune_population_statistics(iterator, model, progress=False)
        np.testing.assert_allclose(model.predictor[0].avg_mean, xs.mean(0), rtol=1e-5)
        np.testing.assert_allclose(model.predictor[0].avg_var, xs.var(0, ddof=1), rtol=1e-5)
        assert model.predictor[0].N == 3
    predictor = chainer.Sequential(L.BatchNormalization(C))
    loss = L.Classifier(predictor)
    finetune_population_statistics(iterator, predictor, eval_func=loss, progress=False)
    np.testing.assert_allclose(predictor[0].avg_mean, xs.mean(0), rtol=1e-5)


def test_dicts() -> None:
    x = batches()[0]
    link = shared()
    finetune_population_statistics([[{"x": row} for row in x]], link, progress=False)
    assert_population(link, [x])


def test_in_a_trainer(tmp_path: Any) -> None:
    pairs, xs = dataset()
    model = L.Classifier(chainer.Sequential(L.BatchNormalization(C), L.Linear(C, C)))
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(pairs, 5), optimizer
    )
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=str(tmp_path))
    iterator = chainer.iterators.SerialIterator(pairs, 4, repeat=False, shuffle=False)
    seen: list[Any] = []
    trainer.extend(FinetunePopulationStatistics(iterator, model, ALONE, progress=False))
    trainer.extend(lambda t: seen.append(dict(t.observation)), name="spy", trigger=(1, "epoch"))
    trainer.run()
    np.testing.assert_allclose(model.predictor[0].avg_mean, xs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.predictor[0].avg_var, xs.var(0, ddof=1), rtol=1e-5)
    # only training's own report
    assert [sorted(o) for o in seen] == [["main/accuracy", "main/loss"]] * 2
    extension = trainer.get_extension("FinetunePopulationStatistics")
    assert extension.priority > chainer.training.PRIORITY_WRITER
    assert extension.priority > chainer.training.extensions.Evaluator.priority


def test_messages() -> None:
    """Two numbers a step, and one message at the end for each link; the links' own are theirs."""
    counting = CountingCommunicator(ALONE)
    finetune(batches(), Net(plain), counting)
    assert counting.take() == [2] * 4 + [2 * C + 2] * 3


def test_ranks_whose_iterators_differ() -> None:
    """1, 0 more and 3 batches; the links' communicator is found."""
    data = [batches((2,)), batches((3,), seed=1), batches((4, 6, 1), seed=2)]

    def rank(world: ThreadCommunicator) -> Any:
        model = Net(lambda: shared(world))
        finetune(data[world.rank], model)
        return model

    steps = [[of_rank[i] for of_rank in data if i < len(of_rank)] for i in range(3)]
    second = []
    for step in steps:
        x = rows(step)
        scale = np.sqrt(x.var(1) + 2e-5)[:, None]
        second += [np.maximum((v - x.mean(1)[:, None]) / scale, 0) ** 2 for v in step]
    for model in run_ranks(3, rank):
        assert_population(model.a, [x for of_rank in data for x in of_rank])
        assert_population(model.b, second)
        assert model.a.N == model.b.N == 3
        assert model.unused.N == 0
        np.testing.assert_array_equal(model.unused.avg_var, 0)


def test_plain_links_pooled() -> None:
    data = [batches(), [], batches((3,), seed=1)]

    def rank(world: ThreadCommunicator) -> Any:
        link = plain()
        finetune(data[world.rank], link, world)
        return link

    for link in run_ranks(3, rank):
        assert_population(link, [x for of_rank in data for x in of_rank])


def test_errors_of_one_rank_are_errors_of_all() -> None:
    cases: list[tuple[Any, Any, str, str]] = [
        (
            Interrupted(OSError("disk")),
            OSError,
            "disk",
            r"`iterator` or `converter` raised on rank",
        ),
        (
            [],
            ValueError,
            r"on every rank.*none on rank\(s\) \[1\] of 2",
            r"none on rank\(s\) \[1\]",
        ),
    ]
    for bad, kind, own, others in cases:

        def rank(world: ThreadCommunicator, case: Any = (bad, kind, own, others)) -> None:
            bad, kind, own, others = case
            model = Net(lambda: shared(world))
            before = state(model)
            if world.rank == 1:
                with pytest.raises(kind, match=own):
                    finetune(bad, model)
            else:
                with pytest.raises((RuntimeError, ValueError), match=others):
                    finetune(batches(), model)
            assert_same(before, state(model))

        run_ranks(2, rank)


def test_bad_arguments() -> None:
    link = shared()
    for build in (finetune, FinetunePopulationStatistics):  # the extension: before the epoch
        with pytest.raises(ValueError, match="`num_passes` must be positive: got 0"):
            build(batches(), link, num_passes=0)
        with pytest.raises(TypeError, match="`num_passes` must be an int: got"):
            build(batches(), link, num_passes=1.5)
        with pytest.raises(ValueError, match="`iterator` must end after one pass: got one"):
            build(chainer.iterators.SerialIterator(batches(), 1), link)
        with pytest.raises(TypeError, match="a communicator must be None"):
            build(batches(), link, "mpi")
        with pytest.raises(TypeError, match="unexpected keyword argument 'passes'"):
            build(batches(), link, passes=2)
    with pytest.raises(ValueError, match="`target` must have a batch normalization link: got none"):
        finetune(batches(), L.Linear(2, 2))
    with pytest.raises(ValueError, match="must have a size: got /0 of `target`, which has seen no"):
        finetune(batches(), chainer.ChainList(L.BatchNormalization(axis=0)))
    with pytest.raises(ValueError, match=r"at least one batch: got none on any of 1 rank\(s\)"):
        finetune([], link)
    with pytest.raises(ValueError, match=r"channels of shape \(3,\)"):
        finetune([np.ones((2, 4))], link)


def test_progress_bar(capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("tqdm")
    finetune(batches(), shared(), progress=True, num_passes=2)
    shown = capsys.readouterr().err
    assert "fine-tuning: 100%" in shown
    assert "6/6" in shown
    pairs, _ = dataset()
    model = L.Classifier(L.BatchNormalization(C))
    finetune_population_statistics(chainer.iterators.SerialIterator(pairs, 4, repeat=False), model)
    assert "3/3" in capsys.readouterr().err
    module = sys.modules["multibn._progress"]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    finetune(batches(), shared(), progress=True)
    assert capsys.readouterr().err == ""
