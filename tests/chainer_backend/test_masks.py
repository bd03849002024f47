"""Masks and lengths in Chainer: elements that do not count take no part, whatever they hold."""

from typing import Any

import chainer
import numpy as np
from chainer import functions as F

from multibn import SingleProcess
from multibn.chainer_backend import (
    FinetunePopulationStatistics,
    MultiNodeBatchNormalization,
    step_statistics,
)
from multibn.parity.oracle import relative_error
from tests.helpers.ranks import ThreadCommunicator, run_ranks

C, STEPS = 3, 7
LENGTHS = [[7, 2, 0, 5], [3, 1, 6]]  # of the samples on two ranks


def batch(rank: int, padding: float = np.nan) -> tuple[Any, Any, Any]:
    """NormArgs, lengths and mask of a rank."""
    rng = np.random.default_rng(rank)
    lengths = np.asarray(LENGTHS[rank])
    mask = np.arange(STEPS) < lengths[:, None]
    x = rng.normal(3, 2, (len(lengths), C, STEPS))
    return np.where(mask[:, None], x, padding), lengths, mask


def chosen(x: Any, mask: Any) -> Any:
    """The elements that count, `(elements, C)`."""
    return np.moveaxis(x, 1, -1)[mask]


def link_of(communicator: Any = None, **options: Any) -> Any:
    communicator = SingleProcess() if communicator is None else communicator
    return MultiNodeBatchNormalization(C, communicator, dtype=np.float64, **options)


def test_masked_elements_take_no_part_in_evaluation() -> None:
    x, lengths, mask = batch(0)
    link = link_of()
    link(x, mask=mask)
    link.cleargrads()
    v = chainer.Variable(x)
    with chainer.using_config("train", False):
        y = link(v, lengths=lengths)
        expected = link(chosen(x, mask)).array
    assert relative_error(chosen(y.array, mask), expected) < 1e-11
    assert not np.moveaxis(y.array, 1, -1)[~mask].any()
    F.sum(y * y).backward()
    assert np.isfinite(link.gamma.grad).all()
    assert not np.moveaxis(v.grad, 1, -1)[~mask].any()


def test_masks_go_with_other_axes() -> None:
    """A mask has the axes that are reduced."""
    x, lengths, mask = batch(0)
    last = np.moveaxis(x, 1, -1).copy()
    link = MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float64, axis=(1, 0))
    y = link(last, mask=mask).array
    expected = link_of()(x, lengths=lengths).array
    assert relative_error(np.moveaxis(y, -1, 1), expected) < 1e-11


class Model(chainer.Chain):
    def __init__(self, communicator: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.norm = link_of(communicator, decay=0.0)

    def forward(self, x: Any, lengths: Any) -> Any:
        return self.norm(x, lengths=lengths)


def test_finetuning_measures_a_model_by_its_masks() -> None:
    """A model that passes masks is measured by them, over uneven ranks, too."""
    data = [batch(0), batch(1)]

    def measure(communicator: ThreadCommunicator) -> Any:
        model = Model(communicator)
        batches = [d[:2] for d in data][: 1 + communicator.rank]
        options: Any = {"converter": None, "progress": False}
        FinetunePopulationStatistics(batches, model, communicator, **options)()
        return model.norm.avg_var

    parts = [chosen(x, mask) for x, _, mask in (data[0], *data)]
    for var in run_ranks(2, measure):
        assert relative_error(var, np.concatenate(parts).var(0, ddof=1)) < 1e-11


def test_finetuning_finds_an_input_that_is_named_last() -> None:
    link, (x, lengths, mask) = link_of(fuse_relu=True), batch(0)
    FinetunePopulationStatistics(
        [(x, lengths)], link, converter=None, progress=False,
        eval_func=lambda x, lengths: link(lengths=lengths, residual=x + 1, x=x),
    )()  # fmt: skip
    assert relative_error(link.avg_mean, chosen(x, mask).mean(0)) < 1e-11


def test_a_step_of_masked_micro_batches_equals_one_batch() -> None:
    link, expected = link_of(), link_of()
    with step_statistics(link):
        for x, lengths, _ in (batch(0), batch(1)):
            link(x, lengths=lengths)
    expected(np.concatenate([chosen(x, mask) for x, _, mask in (batch(0), batch(1))]))
    assert relative_error(link.avg_var, expected.avg_var) < 1e-12
