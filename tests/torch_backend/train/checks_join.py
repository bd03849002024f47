"""Training on uneven data in torch, and whether ranks agree, on real processes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator, Group
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch_backend import (
    average_gradients,
    convert_sync_batchnorm,
    join,
    sync_running_stats,
    update_bn_stats,
)
from multibn.torch_backend import check_sync as expect_in_sync  # not a check of its own
from tests.harness.runs import on, only
from tests.helpers.ranks import CountingCommunicator

RUNS = on("torchrun mpiexec", 3, needs="torch")


SIZES = [[3, 5, 2], [4, 1, 2, 6], [2, 3]]  # of the batches of each rank, 3 against 4 against 2


def _network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
    ).double()


def _batches(rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "x": (rank + torch.randn(n, 3, 4, 4, generator=generator)).double(),
            "target": torch.randint(5, (n,), generator=generator),
        }
        for n in SIZES[rank]
    ]


def _concatenated(size: int) -> list[dict[str, torch.Tensor]]:
    """The batches that the ranks hold together in each step."""
    of_ranks = [_batches(rank) for rank in range(size)]
    steps = []
    for step in range(max(map(len, of_ranks))):
        there = [batches[step] for batches in of_ranks if step < len(batches)]
        steps.append({name: torch.cat([b[name] for b in there]) for name in ("x", "target")})
    return steps


def _optimizer(model: nn.Module) -> Any:
    # Momentum and decay: a rank without data must not stand still.
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def _of_one_process(size: int, num_epochs: int) -> Any:
    model = _network()
    optimizer = _optimizer(model)
    for _ in range(num_epochs):
        for batch in _concatenated(size):
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["target"]).backward()
            optimizer.step()
    return model


def check_uneven_training_equals_one_process(world: Communicator) -> None:
    """Weights, running statistics and losses, over two epochs, with and without DDP."""
    expected = _of_one_process(world.size, num_epochs=2).state_dict()
    ways = ["average_gradients"] + ["ddp"] * isinstance(world, TorchDistributed)
    for way in ways:
        inner = convert_sync_batchnorm(_network(), world)
        model = DistributedDataParallel(inner) if way == "ddp" else inner
        optimizer = _optimizer(model)
        num_steps = 0
        with join(model) as joined:
            for _ in range(2):
                for batch in joined(_batches(world.rank)):
                    optimizer.zero_grad()
                    losses = F.cross_entropy(model(batch["x"]), batch["target"], reduction="none")
                    joined.mean(losses).backward()
                    if way != "ddp":
                        average_gradients(model.parameters(), world)
                    optimizer.step()
                    num_steps += 1
        assert num_steps == 2 * max(map(len, SIZES[: world.size]))
        expect_in_sync(inner, world)
        for name, value in inner.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def check_the_mean_of_the_losses_is_that_of_all_samples(world: Communicator) -> None:
    counting = CountingCommunicator(world)
    with join(nn.Flatten(), counting) as joined:
        step = next(iter(joined(_batches(world.rank))))["target"].double()
        values = joined.mean(step)
    messages = counting.take()
    everything = torch.cat([_batches(rank)[0]["target"] for rank in range(world.size)])
    mean = world.allreduce(values) / world.size
    torch.testing.assert_close(mean, everything.double().mean())
    # A step, the mean, and the end.
    assert messages == [world.size + 1, 1, world.size + 1]


def check_a_rank_without_any_batch_takes_part(world: Communicator) -> None:
    """It learns what a batch looks like from another, and trains with it."""
    last = world.size - 1
    model = convert_sync_batchnorm(_network(), world)
    with join(model) as joined:
        for batch in joined([] if world.rank == last else _batches(world.rank)):
            if world.rank == last:
                assert [v.shape for v in batch.values()] == [(0, 3, 4, 4), (0,)]
                assert [v.dtype for v in batch.values()] == [torch.float64, torch.int64]
            losses = F.cross_entropy(model(batch["x"]), batch["target"], reduction="none")
            joined.mean(losses).backward()
            average_gradients(model.parameters(), world)
    expect_in_sync(model, world)


class _Failing:
    def __iter__(self) -> Any:
        yield torch.ones(2, 3)
        raise OSError("disk")


def _loop(data: Any, world: Communicator, *, break_off: bool = False) -> int:
    num_steps = 0
    with join(nn.Flatten(), world) as joined:
        for _ in joined(data):
            num_steps += 1
            if break_off:
                break
    return num_steps


def check_errors_are_raised_on_all_ranks(world: Communicator) -> None:
    culprit = world.size - 1
    guilty = world.rank == culprit
    x = torch.ones(2, 3)
    cases: list[tuple[Any, type[Exception], str]] = [
        (_Failing(), OSError, "disk"),
        (["no tensor"], TypeError, r"samples on its first axis: got str\. Pass `empty`"),
    ]
    for data, kind, message in cases:
        if guilty:
            with pytest.raises(kind, match=message):
                _loop(data, world)
        else:
            with pytest.raises(
                RuntimeError, match=rf"iterator of the batches raised on rank\(s\) \[{culprit}\] of"
            ):
                _loop([x] * 3, world)
    with pytest.raises(ValueError, match=rf"got none on any of {world.size} rank"):
        _loop([], world)
    unpicklable = [(x, lambda: None)]
    with pytest.raises(TypeError, match=r"must be picklable: that of rank\(s\) \[0\] of"):
        _loop([] if guilty else unpicklable, world)


def check_breaking_off_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    """On one rank it is an error on all, unless nobody has a batch left; on all it is none."""
    culprit = world.size - 1
    guilty = world.rank == culprit
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=rf"rank\(s\) \[{culprit}\] of {world.size} left the"):
        _loop([x] * 3, world, break_off=guilty)
    assert _loop([x] * 3, world, break_off=True) == 1
    assert _loop([x], world, break_off=guilty) == 1


@only("torchrun")
def check_ddps_own_join_is_refused(world: Communicator) -> None:
    """It would abort the process; an error on every rank, and the ranks go on in step."""
    model = DistributedDataParallel(convert_sync_batchnorm(_network()))

    def train(**options: bool) -> None:
        with model.join(**options):
            for batch in _batches(world.rank)[:2]:
                model(batch["x"]).sum().backward()

    with pytest.raises(RuntimeError, match=r"cannot be trained inside Distr"):
        train()
    assert float(world.allreduce(torch.ones(()))) == world.size
    train(enable=False)


def check_the_largest_group_of_layers_takes_part(world: Communicator) -> None:
    """Without a group: the ranks of the largest group of layers."""
    alone = world.split(world.rank)
    counting = CountingCommunicator(world)
    model = nn.Sequential(
        convert_sync_batchnorm(nn.BatchNorm1d(3), alone),
        convert_sync_batchnorm(nn.BatchNorm1d(3), counting),
    )
    with join(model) as joined:
        assert joined.communicator is counting
    with join(model, alone) as joined:
        assert joined.communicator is alone
    in_parts = convert_sync_batchnorm(_network(), Group(world, 1))
    with join(in_parts) as joined:
        assert joined.communicator is world
    world.allreduce(torch.zeros(1))  # nobody leaves while another group still works


def check_every_helper_knows_who_takes_part(world: Communicator) -> None:
    """As the README calls them, without a communicator, on torch.distributed and on MPI."""
    norm = nn.BatchNorm1d(1, momentum=1.0, dtype=torch.float64)
    model = convert_sync_batchnorm(nn.Sequential(norm), world)
    layer, mean = model[0], (world.size - 1) / 2
    x = torch.full((2, 1), float(world.rank), dtype=torch.float64)
    layer.running_mean.fill_(world.rank)
    with pytest.raises(RuntimeError, match=r"1 of 5 .* 0\.running_mean by up to 1 on rank 1"):
        expect_in_sync(model)
    sync_running_stats(model)
    assert float(layer.running_mean) == 0
    update_bn_stats(model.train(), [x], progress=False)
    assert float(layer.running_mean) == mean
    expect_in_sync(model)
    layer.weight.grad = torch.full((1,), float(world.rank), dtype=torch.float64)
    average_gradients(model)
    assert layer.weight.grad.tolist() == [mean]


def check_no_helper_takes_one_rank_for_all(world: Communicator) -> None:
    """A model without synchronized layers tells of no other rank; torch's default group does."""
    model = nn.BatchNorm1d(1)
    model.weight.grad = torch.full((1,), float(world.rank))
    x = torch.full((2, 1), float(world.rank))

    def enter_join() -> None:
        with join(model):
            pass

    helpers: list[Callable[[], object]] = [
        lambda: expect_in_sync(model),
        lambda: sync_running_stats(model),
        lambda: update_bn_stats(model, [x], progress=False),
        lambda: average_gradients(model),
        lambda: average_gradients(model.parameters()),
        enter_join,
    ]
    for helper in helpers:
        if isinstance(world, TorchDistributed):
            helper()
            continue
        with pytest.raises(
            ValueError,
            match=r"`process_group` must say which ranks take part: got None, but the launcher "
            rf"started {world.size} processes \(OMPI_COMM_WORLD_SIZE={world.size}\), the model has "
            "no layer that .* Pass a communicator, .* alone, pass multibn.SingleProcess",
        ):
            helper()
    if isinstance(world, TorchDistributed):
        assert float(model.running_mean) == model.weight.grad.item() == (world.size - 1) / 2  # type: ignore[arg-type]


def check_a_perturbed_element_is_found(world: Communicator) -> None:
    model = convert_sync_batchnorm(_network(), world)
    model.append(nn.BatchNorm1d(5, dtype=torch.bfloat16)).append(nn.LazyLinear(2))
    counting = CountingCommunicator(world)
    expect_in_sync(model, counting)
    assert counting.take() == [32]
    culprit = world.size - 1
    if world.rank == culprit:
        model[2].running_mean[1] += 2**-5
    with pytest.raises(RuntimeError) as caught:
        expect_in_sync(model, counting)
    assert str(caught.value) == (
        f"1 of 21 arrays are not the same on all {world.size} ranks. They differ from rank 0's: "
        f"2.running_mean by up to 0.0312 on rank {culprit}. Broadcast them from one rank, or leave "
        "out by `ignore` what is each rank's own."
    )
    expect_in_sync(model, world, ignore=["*.running_mean"])
    # Rank 0 is another one; bits that no difference shows, and NaN, are found too.
    counter = model[0].num_batches_tracked
    with torch.no_grad():
        model[2].running_mean.zero_()
        if world.rank == 0:
            model[1].bias[0] = torch.nan
            model[6].running_var[2] = 1.5
            counter += 1
        model[2].running_mean *= -1 if world.rank == culprit else 1
    with pytest.raises(RuntimeError, match="4 of 21 arrays") as caught:
        expect_in_sync(model, world)
    for words in (
        "0.num_batches_tracked by up to 1 on rank 1",
        "1.bias by up to nan on rank 1",
        f"2.running_mean by up to 0 on rank {culprit};",
        "6.running_var by up to 0.5 on rank 1",
    ):
        assert words in str(caught.value)


def check_models_of_other_structure_are_an_error(world: Communicator) -> None:
    model = _network()
    if world.rank == 1:
        model[5] = nn.Linear(16, 6, dtype=torch.float64)
        del model[0].num_batches_tracked
    with pytest.raises(RuntimeError, match="built alike on all") as caught:
        expect_in_sync(model, world)
    for words in (
        "rank 1 has 5.bias of shape (6,) and dtype torch.float64",
        "lacks 0.num_batches_tracked of shape () and dtype torch.int64",
    ):
        assert words in str(caught.value)
    same = copy.deepcopy(_network())
    expect_in_sync(same, world)
