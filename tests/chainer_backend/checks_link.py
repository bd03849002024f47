"""Links on real processes: groups, fine-tuning, and whether the ranks of a model agree."""

import sys
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L

from multibn.chainer_backend import (
    FinetunePopulationStatistics,
    MultiNodeBatchNormalization,
    create_mnbn_model,
    multi_node_batch_normalization,
)
from multibn.chainer_backend import check_sync as expect_in_sync  # not a check of its own
from multibn.communicators import Communicator, SingleProcess
from tests.harness.runs import on, only
from tests.helpers import require
from tests.helpers.normalized import normalized
from tests.helpers.ranks import CountingCommunicator, refusal

RUNS = on("torchrun mpiexec", 2, 3, needs="chainer")

C = 3


def _normal(seed: Any, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def check_nan_in_a_gradient_is_named_in_debug_mode(world: Communicator) -> None:
    link = MultiNodeBatchNormalization(3, world)
    y = link(np.random.default_rng(world.rank).normal(size=(4, 3)).astype(np.float32))
    y.grad = np.ones((4, 3), np.float32)
    if world.rank == 1:
        y.grad[0, 0] = np.nan
    message = rf"gradient of the output of .* has NaN on rank\(s\) \[1\] of {world.size}\. Check"
    with chainer.using_config("debug", True), pytest.raises(FloatingPointError, match=message):
        y.backward()


def check_a_link_sends_one_message_each_way_and_none_in_evaluation(world: Communicator) -> None:
    counting = CountingCommunicator(world)
    link, x = MultiNodeBatchNormalization(C, counting), _normal(world.rank, 4, C)
    for _ in range(2):
        F.sum(link(x)).backward()
    assert len(counting.take()) == 2 * 2
    assert len(counting.first_messages) == 1
    with chainer.using_config("train", False):
        link(x)
    assert not counting.messages


@only("torchrun")
def check_links_under_torchrun_import_no_mpi(world: Communicator) -> None:
    """A link takes torch's process groups as they are."""
    import torch.distributed as dist

    xs = [_normal(rank, 2 + rank, C) for rank in range(world.size)]
    expected = normalized(xs, 2e-5)[world.rank]
    for comm in (dist.group.WORLD, None):
        link = MultiNodeBatchNormalization(C, comm, dtype=np.float64)
        y = link(xs[world.rank]).array
        np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
    assert "mpi4py.MPI" not in sys.modules


@only("mpiexec", sizes=(2,))
def check_persistent_values_of_any_kind_are_compared_or_refused(world: Communicator) -> None:
    different = r"/own (on rank\(s\) \[1\]|by up to 1 on rank 1)\. "
    refused = "`/own`, a ndarray, cannot be compared: it holds Python objects"
    for values, kind, said in (
        ((2**64 - 1, 2**64 - 2), RuntimeError, different),
        (("one", "two"), RuntimeError, different),
        (([1, 2], [1, 3]), RuntimeError, different),
        ((None, 1), RuntimeError, "lacks /own with shape=no value yet"),
        ((10**30, 10**30), TypeError, refused),
        ((object(), object()), TypeError, refused),
        (([[1], [1, 2]],) * 2, TypeError, refused),
        ((1, object()), (RuntimeError, TypeError)[world.rank], r"cannot be compared(:| on rank\()"),
    ):
        link = chainer.Link()
        link.add_persistent("own", values[world.rank])
        with pytest.raises(kind, match=said):
            expect_in_sync(link, world)
        expect_in_sync(link, world, ignore="/own")
    link.own = "one"
    expect_in_sync(link, world)


@only("mpiexec", sizes=(3,))
def check_every_helper_knows_who_takes_part(world: Communicator) -> None:
    """README calls them without a communicator."""
    model = chainer.Sequential(MultiNodeBatchNormalization(1, world, dtype=np.float64))
    data = [np.full((2, 1), float(world.rank))]
    FinetunePopulationStatistics(data, model, converter=None, progress=False)()
    assert model[0].avg_mean.tolist() == [(world.size - 1) / 2]
    expect_in_sync(model)
    model[0].avg_mean += world.rank
    with pytest.raises(RuntimeError, match=r"/0/avg_mean by up to 1 on rank 1"):
        expect_in_sync(model)


@only("mpiexec", sizes=(3,))
def check_no_helper_takes_one_rank_for_all(world: Communicator) -> None:
    model = L.BatchNormalization(1)
    data = [np.ones((2, 1), dtype=np.float32)]

    def finetune(comm: Any = None) -> None:
        FinetunePopulationStatistics(data, model, comm, converter=None, progress=False)()

    helpers: list[Callable[[], object]] = [lambda: expect_in_sync(model), finetune]
    for helper in helpers:
        with pytest.raises(
            ValueError,
            match=r"`comm` must say which ranks take part: got None, but the launcher started "
            rf"{world.size} processes \(OMPI_COMM_WORLD_SIZE={world.size}\)",
        ):
            helper()
    finetune(SingleProcess())
    model = create_mnbn_model(model, SingleProcess())
    data = [np.full((2, 1), world.rank, dtype=np.float32)]
    finetune()  # a choice that was made for all links is one for the functions
    assert model.avg_mean.tolist() == [world.rank]
    expect_in_sync(model)
    pair = MultiNodeBatchNormalization(1, world.split(world.rank == 0))
    if world.rank:
        message = r"different groups: SingleProcess\(\) in /0; .* in /1\."
        with pytest.raises(ValueError, match=message):
            expect_in_sync(chainer.Sequential(model, pair))


@only("mpiexec", sizes=(3,))
def check_a_link_that_one_rank_never_called_is_an_error(world: Communicator) -> None:
    link = L.Linear(2)
    if world.rank == 1:
        link(np.ones((1, 3), dtype=np.float32))
    with pytest.raises(RuntimeError, match=r"rank 1 has /W with shape=\(2, 3\), dtype=float32, la"):
        expect_in_sync(link, world)


def check_a_warning_that_is_an_error_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    """Where it would come before the first message."""
    link, x = MultiNodeBatchNormalization(C, world), _normal(world.rank, 4, C).astype("f")
    require.check_a_missing_core_on_rank_0(world.rank, lambda: link(x))
    assert link(x).shape == x.shape


def check_the_function_moves_the_running_arrays_of_any_slice(world: Communicator) -> None:
    """Equal Chainer's function on the data of all ranks: outputs, gradients, moving averages."""
    normalize: Any = multi_node_batch_normalization
    whole, dys = (_normal(i, 3 * world.size, 6, 2) for i in (0, 1))
    whole += 3.0 * np.arange(len(whole))[:, None, None]
    mine = slice(3 * world.rank, 3 * world.rank + 3)
    gammas = [chainer.Parameter(_normal(2, 6)) for _ in range(2)]
    betas = [chainer.Parameter(_normal(3, 6)) for _ in range(2)]
    averages = [(np.zeros(6), np.ones(6)) for _ in range(2)]
    counting = CountingCommunicator(world)
    for part in (slice(6), slice(4), slice(0, 6, 2), slice(4)):
        xs = chainer.Variable(whole[:, part].copy()), chainer.Variable(whole[mine, part].copy())
        calls: Any = (
            F.batch_normalization,
            lambda *arrays, **options: normalize(*arrays, counting, **options),
        )
        ys = []
        for x, dy, call, gamma, beta, (mean, var) in zip(
            xs, (dys, dys[mine]), calls, gammas, betas, averages, strict=True
        ):
            running = {"running_mean": mean[part], "running_var": var[part]}
            gamma.cleargrad()
            ys.append(call(x, gamma[part], beta[part], decay=0.7, **running))
            ys[-1].grad = dy[:, part].copy()
            ys[-1].backward()
        np.testing.assert_allclose(ys[1].array, ys[0].array[mine], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(xs[1].grad, xs[0].grad[mine], rtol=1e-9, atol=1e-12)
        mean_gradient = gammas[0].grad / world.size
        of_all = world.allreduce(gammas[1].grad) / world.size
        np.testing.assert_allclose(of_all, mean_gradient, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(averages[1], averages[0], rtol=1e-12)
    assert len(counting.messages) == 2 * 4  # one each way
    assert len(counting.first_messages) == len({6, 4, 3})
    arrays = [np.ones(6), np.zeros(6)]
    for wrong, found in (
        (
            {"running_mean": np.zeros(6)},
            "`running_mean` and `running_var` must both be arrays, or both None: got one",
        ),
        (
            {"running_mean": np.zeros(6), "running_var": np.ones(4)},
            r"`running_var` must have shape \(6,\), a number for each channel .*: got shape \(4,\)",
        ),
        ({"decay": 3}, r"`decay` must be in \[0, 1\]: got 3"),
    ):
        options: Any = wrong if world.rank == 1 else {}
        with refusal(world, 1, ValueError, found):
            normalize(whole[mine], *arrays, world, **options)
    moved: dict[str, Any] = {"running_mean": np.zeros(6), "running_var": np.ones(6)}
    moved["decay"] = 0.5 if world.rank == 1 else 0.9
    with pytest.raises(ValueError, match=r"\[1\] with decay=0\.5"):
        normalize(whole[mine], *arrays, world, **moved)
