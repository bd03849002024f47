"""Fine-tuning of population statistics in one process."""

from functools import partial
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L

from multibn import SingleProcess
from multibn.chainer_backend import (
    FinetunePopulationStatistics,
    MultiNodeBatchNormalization,
    step_statistics,
)
from multibn.engine.statistics import OneValueError
from tests.engine import test_population_of_models as population
from tests.engine.test_population_of_models import batches, rows
from tests.helpers.ranks import ThreadCommunicator, run_ranks

CHAINER = population.Chainer()
C, LOCAL = population.C, SingleProcess()


def plain() -> Any:
    return L.BatchNormalization(C, dtype=np.float64)


def shared(communicator: Any = LOCAL) -> Any:
    return MultiNodeBatchNormalization(C, communicator, dtype=np.float64)


assert_population, finetune = partial(population.assert_population, CHAINER), CHAINER.run


def test_a_last_batch_of_one_sample_is_an_error_of_multi_node_links() -> None:
    data = [np.ones((3, C)), np.ones((1, C))]
    message = r"need more than 1 value .* leave out the last batch .drop_last=True"
    with pytest.raises(OneValueError, match=message):
        finetune(data, shared())


def test_a_step_of_step_statistics_stands_aside() -> None:
    link, (x,) = shared(), batches([5], seed=1)
    with step_statistics(link):
        link(x)
        finetune(batches(), link)
        assert_population(link, batches())
    mean = 0.9 * rows(batches()).mean(1) + 0.1 * rows([x]).mean(1)
    np.testing.assert_allclose(link.avg_mean, mean, rtol=1e-10)


def test_finetuning_follows_the_axes_of_a_link() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, C))
    for link in (
        L.BatchNormalization(C, axis=(0, 1), dtype=np.float64),
        MultiNodeBatchNormalization(C, LOCAL, axis=(0, 1), dtype=np.float64),
        MultiNodeBatchNormalization((5, C), LOCAL, dtype=np.float64),
    ):
        finetune([x], link)
        reduced = tuple(range(3 - link.avg_mean.ndim))
        np.testing.assert_allclose(link.avg_mean, x.mean(reduced))
        np.testing.assert_allclose(link.avg_var, x.var(reduced, ddof=1))


def test_finetune_argument_of_the_model_changes_nothing() -> None:
    link = shared()
    finetune(batches(), link, eval_func=lambda x: link(x, True))
    assert_population(link, batches())
    assert link.N == 3


def dataset() -> Any:
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(10, C)).astype("f")
    return chainer.datasets.TupleDataset(xs, np.arange(10, dtype=np.int32) % C), xs


@pytest.mark.parametrize("kind", ["SerialIterator", "MultithreadIterator"])
def test_finetuning_takes_iterators_and_classifiers(kind: str) -> None:
    pairs, xs = dataset()
    iterator = getattr(chainer.iterators, kind)(pairs, 4, repeat=False)
    model = L.Classifier(chainer.Sequential(L.BatchNormalization(C), F.relu))
    extension = FinetunePopulationStatistics(iterator, model, progress=False)
    for _ in range(2):  # an iterator that was used up is reset
        extension()
        np.testing.assert_allclose(model.predictor[0].avg_mean, xs.mean(0), rtol=1e-5)
        np.testing.assert_allclose(model.predictor[0].avg_var, xs.var(0, ddof=1), rtol=1e-5)
        assert model.predictor[0].N == 3
    predictor = chainer.Sequential(L.BatchNormalization(C))
    loss = L.Classifier(predictor)
    FinetunePopulationStatistics(iterator, predictor, eval_func=loss, progress=False)()
    np.testing.assert_allclose(predictor[0].avg_mean, xs.mean(0), rtol=1e-5)


def test_a_converter_gets_the_device_of_the_model_or_the_one_that_is_named() -> None:
    devices: list[Any] = []

    def convert(batch: Any, device: Any) -> Any:
        devices.append(device)
        return batch

    link = shared()
    for options in ({}, {"device": "@numpy"}):
        finetune(batches()[:1], link, converter=convert, **options)
    assert devices == [link.device, "@numpy"]


def test_finetuning_takes_batches_of_dicts() -> None:
    x = batches()[0]
    link = shared()
    finetune([[{"x": row} for row in x]], link, converter=chainer.dataset.concat_examples)
    assert_population(link, [x])


def test_a_trainer_finetunes_before_it_evaluates_and_writes(tmp_path: Any) -> None:
    pairs, xs = dataset()
    model = L.Classifier(chainer.Sequential(L.BatchNormalization(C), L.Linear(C, C)))
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(pairs, 5), optimizer
    )
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=str(tmp_path))
    iterator = chainer.iterators.SerialIterator(pairs, 4, repeat=False, shuffle=False)
    seen: list[Any] = []
    trainer.extend(FinetunePopulationStatistics(iterator, model, LOCAL, progress=False))
    trainer.extend(lambda t: seen.append(dict(t.observation)), name="spy", trigger=(1, "epoch"))
    trainer.run()
    np.testing.assert_allclose(model.predictor[0].avg_mean, xs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.predictor[0].avg_var, xs.var(0, ddof=1), rtol=1e-5)
    # only training's own report
    assert [sorted(o) for o in seen] == [["main/accuracy", "main/loss"]] * 2
    extension = trainer.get_extension("FinetunePopulationStatistics")
    assert extension.priority > chainer.training.PRIORITY_WRITER
    assert extension.priority > chainer.training.extensions.Evaluator.priority


class _Scoped(chainer.Chain):
    """Reads its own report, and calls two of its links in evaluation."""

    def __init__(self, communicator: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.bn, self.frozen = shared(communicator), shared(communicator)
            self.local = plain()

    def forward(self, x: Any) -> Any:
        seen: dict[str, float] = {}
        with chainer.report_scope(seen), chainer.using_config("train", False):
            chainer.report({"loss": 1.0}, self)
            self.frozen(self.local(x))
        assert list(seen.values()) == [1.0]
        return self.bn(x)


@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_pass_may_read_its_reports_and_call_links_in_evaluation(size: int) -> None:
    """A rank without data left repeats no call in evaluation."""

    def work(world: ThreadCommunicator) -> None:
        model = _Scoped(world)
        finetune(batches()[world.rank :], model, world)
        assert_population(model.bn, [x for rank in range(size) for x in batches()[rank:]])
        assert [link.N for link in (model.bn, model.frozen, model.local)] == [3, 0, 0]
        np.testing.assert_array_equal(model.local.avg_mean, 0)

    run_ranks(size, work)


def test_bad_arguments_are_refused() -> None:
    link = shared()
    with pytest.raises(ValueError, match="`iterator` must end after one pass: got one"):
        FinetunePopulationStatistics(chainer.iterators.SerialIterator(batches(), 1), link)
    with pytest.raises(ValueError, match="`target` must have a batch normalization link: got none"):
        finetune(batches(), L.Linear(2, 2))
    with pytest.raises(ValueError, match=r"in `target` is not initialized \(size=None\)"):
        finetune(batches(), chainer.ChainList(L.BatchNormalization(axis=0)))
    with pytest.raises(ValueError, match=r"channels of shape \(3,\)"):
        finetune([np.ones((2, 4))], link)
