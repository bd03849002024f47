"""Whether the ranks of a Chainer model agree, and who they are, on real processes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multibn.chainer_backend import (
    MultiNodeBatchNormalization,
    create_mnbn_model,
    finetune_population_statistics,
)
from multibn.chainer_backend import check_sync as expect_in_sync  # not a check of its own
from multibn.communicators import Communicator, SingleProcess
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator

import chainer  # isort: skip (multibn makes it importable)
from chainer import links as L  # isort: skip

RUNS = on("mpiexec", 3, needs="chainer")


class Net(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.norm = L.BatchNormalization(3)
            self.conv = L.Convolution2D(3, 4, 3)
            self.norm2 = L.BatchNormalization(4)
            self.fc = L.Linear(4, 5)


def _network(comm: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers draw from it)
    with chainer.using_config("dtype", np.float64):
        return create_mnbn_model(Net(), comm)


def check_a_perturbed_element_is_found(world: Communicator) -> None:
    model = _network(world)
    counting = CountingCommunicator(world)
    expect_in_sync(model, counting)
    assert counting.take() == [32]
    culprit = world.size - 1
    if world.rank == culprit:
        model.norm2.avg_var[1] += 0.5
        model.norm.N += 1
    with pytest.raises(RuntimeError) as caught:
        expect_in_sync(model, world)
    for words in (
        f"/norm2/avg_var by up to 0.5 on rank {culprit}",
        f"/norm/N by up to 1 on rank {culprit}",
    ):
        assert words in str(caught.value)
    expect_in_sync(model, world, ignore=["*/avg_var", "*/N"])


def check_every_helper_knows_who_takes_part(world: Communicator) -> None:
    """As the README calls them, without a communicator."""
    model = chainer.Sequential(MultiNodeBatchNormalization(1, world, dtype=np.float64))
    data = [np.full((2, 1), float(world.rank))]
    finetune_population_statistics(data, model, converter=None, progress=False)
    assert model[0].avg_mean.tolist() == [(world.size - 1) / 2]
    expect_in_sync(model)
    model[0].avg_mean += world.rank
    with pytest.raises(RuntimeError, match=r"/0/avg_mean by up to 1 on rank 1"):
        expect_in_sync(model)


def check_no_helper_takes_one_rank_for_all(world: Communicator) -> None:
    model = L.BatchNormalization(1)
    data = [np.ones((2, 1), dtype=np.float32)]

    def finetune(comm: Any = None) -> None:
        finetune_population_statistics(data, model, comm, converter=None, progress=False)

    helpers: list[Callable[[], object]] = [lambda: expect_in_sync(model), finetune]
    for helper in helpers:
        with pytest.raises(
            ValueError,
            match=r"`comm` must say which ranks take part: got None, but the launcher started "
            rf"{world.size} processes \(OMPI_COMM_WORLD_SIZE={world.size}\)",
        ):
            helper()
    finetune(SingleProcess())


def check_a_link_that_one_rank_never_called_is_an_error(world: Communicator) -> None:
    link = L.Linear(2)
    if world.rank == 1:
        link(np.ones((1, 3), dtype=np.float32))
    with pytest.raises(
        RuntimeError, match=r"rank 1 has /W of shape \(2, 3\) and dtype float32, la"
    ):
        expect_in_sync(link, world)
