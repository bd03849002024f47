"""Reversible blocks over ranks: batch statistics, collectives, DistributedDataParallel."""

import functools
import itertools
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from multibn import SingleProcess
from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from multibn.torch_backend.reversible import ReversibleSequence
from tests.harness.runs import on, only
from tests.helpers.ranks import CountingCommunicator

RUNS = on("torchrun mpiexec", 2, needs="torch")

BLOCKS, CHANNELS = 3, 4
MODES = ("stored", "reversible")


def _shards(world: Communicator, second: int = 3) -> list[list[Tensor]]:
    """Both streams of every rank: 7 samples, then `second`."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(n, CHANNELS, 5, generator=generator).double().requires_grad_()
            for _ in range(2)
        ]
        for n in [7, second, *[2] * world.size][: world.size]
    ]


def _model(communicator: Any, mode: Any) -> ReversibleSequence:
    torch.manual_seed(0)
    norm = functools.partial(SyncBatchNorm, CHANNELS, process_group=communicator)
    conv = functools.partial(nn.Conv1d, CHANNELS, CHANNELS, 3, padding=1, bias=False)
    return ReversibleSequence(
        [[nn.Sequential(norm(), nn.GELU(), conv(), norm()) for _ in "FG"] for _ in range(BLOCKS)],  # type: ignore[misc]
        mode=mode,
    ).double()


def _loss(y1: Tensor, y2: Tensor) -> Tensor:
    return y1.square().sum() + y2.pow(3).sum() + (y1 * y2).sum()


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _state(model: nn.Module) -> Tensor:
    return torch.cat([b.flatten().double() for b in model.buffers()])


def _expect_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def _whole(world: Communicator, second: int = 3) -> nn.Module:
    """The model after a step of one process on all shards."""
    model = _model(SingleProcess(), "stored")
    _loss(*model(*map(torch.cat, zip(*_shards(world, second), strict=True)))).backward()
    return model


def check_unequal_shards_are_the_whole_batch(world: Communicator) -> None:
    """Also if a rank holds nothing: it takes part."""
    for second, mode in itertools.product((3, 0), MODES):
        whole = _whole(world, second)
        counting = CountingCommunicator(world)
        model = _model(counting, mode)
        ys = model(*_shards(world, second)[world.rank])
        forward = len(counting.take())
        _loss(*ys).backward()
        backward = len(counting.take())
        gradients = world.allreduce(_gradients(model))
        # Forward, and backward with the recomputation in it: one for each of the norms.
        assert (forward, backward) == (4 * BLOCKS, 4 * BLOCKS)
        _expect_close(gradients, _gradients(whole))
        _expect_close(_state(model), _state(whole))


def check_undoing_does_not_communicate(world: Communicator) -> None:
    """A half whose stream has no loss is undone without its gradient."""
    counting = CountingCommunicator(world)
    model = _model(counting, "reversible")
    y1, _ = model(*_shards(world)[world.rank])
    counting.take()
    y1.sum().backward()
    assert len(counting.take()) == 4 * BLOCKS - 2  # all but those of the last G


@only("torchrun")
def check_defect_13_ddp_trains_like_the_whole_batch(world: Communicator) -> None:
    whole = _whole(world)
    options: list[dict[str, Any]] = [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
    ]
    for option in options:
        model = _model(world, "reversible")
        parallel = DistributedDataParallel(model, **option)
        for step in range(2):  # the first step of a static graph is not like the others
            parallel.zero_grad()
            _loss(*parallel(*_shards(world)[world.rank])).backward()
            _expect_close(_gradients(model) * world.size, _gradients(whole))
            if step == 0:
                _expect_close(_state(model), _state(whole))


@only("torchrun")
def check_gradients_accumulate_without_synchronization(world: Communicator) -> None:
    results = []
    for mode in MODES:
        model = _model(world, mode)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        xs = _shards(world)[world.rank]
        with parallel.no_sync():
            _loss(*parallel(*xs)).backward()
        # One stream's loss: the last G gets no gradient.
        parallel(*(2 * x for x in xs))[0].square().sum().backward()
        results.append((_gradients(model), _state(model)))
    for found, expected in zip(*results, strict=True):
        _expect_close(found, expected)


@only("torchrun")
def check_fsdp_shards_whole_chains(world: Communicator) -> None:
    """Numbers are one process's on the whole batch; parts of F and G are refused, or stored."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    mesh = init_device_mesh("cpu", (world.size,))
    x = torch.randn(8, CHANNELS, 5, generator=torch.Generator().manual_seed(0)).double()
    for mode, part in (
        ("reversible", ""),
        ("stored", "F"),
        *(("reversible", part) for part in ("F", "G", "F.2")),
    ):
        chains, expected = (
            nn.ModuleList(_model(communicator, mode) for _ in "ab")
            for communicator in (world, SingleProcess())
        )
        shard: Any = functools.partial(fully_shard, mesh=mesh)
        if part:
            shard(chains.get_submodule(f"0.layers.1.{part}"))
        for chain in chains:
            shard(chain)

        def train(chains: Any, x: Tensor) -> None:
            _loss(*chains[1](*chains[0](x, x))).div(len(x)).backward()

        if mode == "reversible" and part:
            message = rf"{part[0]} of block 1 is sharded by FSDP.*Call"
            with pytest.raises(RuntimeError, match=message):
                train(chains, x[world.rank :: world.size])
            continue
        train(chains, x[world.rank :: world.size])
        train(expected, x)
        grads = [cast("Any", p.grad).full_tensor().flatten() for p in chains.parameters()]
        _expect_close(torch.cat(grads), _gradients(expected))
