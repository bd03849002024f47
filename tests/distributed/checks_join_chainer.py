"""Training on uneven data in Chainer, and whether ranks agree, on real processes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multibn.chainer_backend import (
    MultiNodeBatchNormalization,
    create_mnbn_model,
    finetune_population_statistics,
    join,
)
from multibn.chainer_backend import check_sync as expect_in_sync  # not a check of its own
from multibn.communicators import Communicator, SingleProcess
from tests.helpers.ranks import CountingCommunicator

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F, links as L  # isort: skip

NUM_SAMPLES = (6, 8, 3)  # of each rank: 3, 4 and 2 batches of two
NUM_STEPS = 4


class Net(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.norm = L.BatchNormalization(3)
            self.conv = L.Convolution2D(3, 4, 3)
            self.norm2 = L.BatchNormalization(4)
            self.fc = L.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.norm2(self.conv(self.norm(x))))
        return self.fc(F.max_pooling_2d(h, 2))  # neither takes an empty batch


def _network(comm: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers draw from it)
    with chainer.using_config("dtype", np.float64):
        return create_mnbn_model(Net(), comm)


def _samples(rank: int) -> list[Any]:
    rng = np.random.default_rng(rank)
    n = NUM_SAMPLES[rank]
    xs, targets = rng.normal(rank, 1, (n, 3, 4, 4)), rng.integers(5, size=n, dtype=np.int32)
    return list(zip(xs, targets, strict=True))


def _optimizer(model: Any) -> Any:
    return chainer.optimizers.MomentumSGD(0.1).setup(model)


def _of_one_process(size: int) -> Any:
    model = _network(SingleProcess())
    optimizer = _optimizer(model)
    for _ in range(2):
        for step in range(NUM_STEPS if size > 1 else NUM_STEPS - 1):
            batch = [s for rank in range(size) for s in _samples(rank)[2 * step : 2 * step + 2]]
            x, target = chainer.dataset.concat_examples(batch)
            optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, target)
    return model


def _average_gradients(model: Any, world: Communicator) -> None:
    for _, parameter in sorted(model.namedparams()):
        parameter.grad = world.allreduce(parameter.grad) / world.size


def check_uneven_training_equals_one_process(world: Communicator) -> None:
    expected = _of_one_process(world.size)
    model = _network(world)
    optimizer = _optimizer(model)
    iterator = chainer.iterators.SerialIterator(
        _samples(world.rank), 2, repeat=False, shuffle=False
    )
    num_steps = 0
    with join(model) as joined:
        for _ in range(2):
            for x, target in joined(iterator):
                losses = F.softmax_cross_entropy(model(x), target, reduce="no")
                loss = joined.mean(losses)
                model.cleargrads()
                loss.backward()
                _average_gradients(model, world)
                optimizer.update()
                num_steps += 1
    assert num_steps == 2 * NUM_STEPS
    expect_in_sync(model, world)
    wanted = {name: p.array for name, p in expected.namedparams()}
    for name, parameter in model.namedparams():
        np.testing.assert_allclose(parameter.array, wanted[name], rtol=1e-12, atol=1e-12)
    for name in ("norm", "norm2"):
        for average in ("avg_mean", "avg_var"):
            np.testing.assert_allclose(
                getattr(model[name], average),
                getattr(expected[name], average),
                rtol=1e-12,
                atol=1e-12,
            )


def check_a_rank_without_any_batch(world: Communicator) -> None:
    """It is given samples of another rank's, which leaves no trace in any link."""
    model = chainer.Sequential(
        MultiNodeBatchNormalization(3, world, dtype=np.float64),
        L.BatchNormalization(3, dtype=np.float64),
    )
    last = world.size - 1
    x = np.random.default_rng(0).normal(size=(4, 3))
    for data in ([x], [x, x]):
        with join(model, converter=None) as joined:
            for batch in joined([] if world.rank == last else data):
                assert joined.absent == (world.rank == last)
                np.testing.assert_array_equal(batch, x[: 2 if joined.absent else 4])
                model.cleargrads()
                joined.mean(model(batch) ** 2).backward()
    np.testing.assert_allclose(model[0].avg_mean, (1 - 0.9**3) * x.mean(0), rtol=1e-12)
    if world.rank == last:
        assert not model[1].avg_mean.any()
        assert not model[1].gamma.grad.any()
    assert "forward" not in vars(model[0])
    assert "forward" not in vars(model[1])
    assert model[1].decay == 0.9
    expect_in_sync(model, world, ignore=["/1/*"])


class Residual(chainer.Chain):
    def __init__(self, comm: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.shortcut = MultiNodeBatchNormalization(3, comm, dtype=np.float64)
            self.norm = MultiNodeBatchNormalization(3, comm, dtype=np.float64, fuse_relu=True)

    def forward(self, x: Any) -> Any:
        return self.norm(x, residual=self.shortcut(x))


def check_stand_ins_of_a_residual(world: Communicator) -> None:
    """The branch of the residual has its collectives, too, and the stand-in leaves no trace."""
    model = Residual(world)
    last = world.size - 1
    x = np.random.default_rng(0).normal(size=(4, 3))
    with join(model, converter=None) as joined:
        for batch in joined([x] if world.rank == last else [x, x]):
            model.cleargrads()
            y = model(batch)
            assert y.shape == batch.shape
            joined.mean(F.sum(y * y, axis=1)).backward()
    for link in (model.shortcut, model.norm):
        np.testing.assert_allclose(link.avg_mean, (1 - 0.9**2) * x.mean(0), rtol=1e-12)
    expect_in_sync(model, world)


def check_errors(world: Communicator) -> None:
    guilty = world.rank == world.size - 1
    with pytest.raises(RuntimeError, match="left the loop"):
        _run([np.ones((2, 3))] * 2, world, break_off=guilty)
    if guilty:
        with pytest.raises(TypeError, match=r"got str\. Pass a `converter` that makes arrays"):
            _run(["no array"], world)
    else:
        with pytest.raises(RuntimeError, match="iterator of the batches raised"):
            _run([np.ones((2, 3))], world)


def _run(data: Any, world: Communicator, *, break_off: bool = False) -> None:
    with join(L.Linear(2), world, converter=None) as joined:
        for _ in joined(data):
            if break_off:
                break


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

    def enter_join() -> None:
        with join(model):
            pass

    def finetune(comm: Any = None) -> None:
        finetune_population_statistics(data, model, comm, converter=None, progress=False)

    helpers: list[Callable[[], object]] = [lambda: expect_in_sync(model), finetune, enter_join]
    for helper in helpers:
        with pytest.raises(
            ValueError,
            match=r"`comm` must say which ranks take part: got None, but the launcher started "
            rf"{world.size} processes \(OMPI_COMM_WORLD_SIZE={world.size}\)",
        ):
            helper()
    finetune(SingleProcess())


def check_a_link_that_one_rank_never_called(world: Communicator) -> None:
    link = L.Linear(2)
    if world.rank == 1:
        link(np.ones((1, 3), dtype=np.float32))
    with pytest.raises(
        RuntimeError, match=r"rank 1 has /W of shape \(2, 3\) and dtype float32, la"
    ):
        expect_in_sync(link, world)
