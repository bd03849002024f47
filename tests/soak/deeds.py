"""What a long run does again and again."""

import io
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from multibn import SingleProcess
from multibn.communicators import Communicator, as_communicator
from multibn.communicators.communicator import gather
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm
from tests.soak.held import Held, base_store

WIDTHS = range(3, 1603, 8)  # 200 of them


class Row(NamedTuple):
    """One deed, done many times: what was held after the first half, and at the end."""

    deed: str
    turns: int
    before: list[float]  # the most that a rank held, in the order of `held.COLUMNS`
    after: list[float]
    growth: list[str]  # of the ranks that have grown


def hold(deed: Callable[[Communicator], object], world: Communicator, seconds: float) -> Row:
    """Do `deed` for so long on all ranks, but 4 times at least. Collective."""
    start, turns, half = time.monotonic(), 0, False
    before = Held.now()
    while True:
        deed(world)
        turns += 1
        share = (time.monotonic() - start) / seconds
        # All ranks must take the same number of turns.
        mean = float(world.allreduce(np.array([share]))[0]) / world.size
        if not half and turns >= 2 and mean >= 0.5:
            half, before = True, Held.now()
        elif half and turns >= 4 and mean >= 1:
            break
    after = Held.now()
    all_ranks = gather([before, after, after.growth(before)], world)
    befores, afters, growths = zip(*all_ranks, strict=True)
    growth = [f"rank {rank}, {deed.__name__}: {text}" for rank, text in enumerate(growths) if text]
    most = [[max(column) for column in zip(*rows, strict=True)] for rows in (befores, afters)]
    return Row(deed.__name__, turns, most[0], most[1], growth)


def steps(world: Communicator) -> None:
    """Training steps of one network."""
    train(_network(world), 5)


def models(world: Communicator) -> None:
    """Models built, converted, trained and dropped."""
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.BatchNorm2d(24))
    train(convert_sync_batchnorm(model, process_group=world), 1)


def widths(world: Communicator, some: range = WIDTHS) -> None:
    """200 layers of as many widths; a quarter of them where ranks outnumber the cores by far."""
    for C in some if world.size < 16 else some[::4]:
        SyncBatchNorm(C, process_group=world)(torch.ones(2, C))


def groups(world: Communicator) -> None:
    """A group made, used and destroyed."""
    group = new_group(world)
    train(_network(as_communicator(group)), 1)
    destroy(group)


def new_group(world: Communicator) -> Any:
    """A group of the user's, of all ranks."""
    if type(world).__name__ == "MPI":
        return world.mpi_comm.Dup()  # type: ignore[attr-defined]
    return dist.new_group(list(range(world.size)))


def destroy(group: Any) -> None:
    """What the user calls when done with a group."""
    if hasattr(group, "Free"):
        group.Free()
    else:
        dist.destroy_process_group(group)


def saves(world: Communicator) -> None:
    """A model saved, loaded and trained."""
    file = io.BytesIO()
    model = _network(world)
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    train(pickle.loads(pickle.dumps(model)), 1)


def forks(world: Communicator) -> None:
    """A forked child that trains a layer of its own."""
    train(_network(world), 1)
    child = os.fork()
    if child == 0:
        layer = SyncBatchNorm(3, process_group=SingleProcess())
        layer(torch.ones(2, 3, requires_grad=True)).sum().backward()
        os._exit(0 if layer.running_mean.isfinite().all() else 1)  # type: ignore[union-attr]
    assert os.waitpid(child, 0)[1] == 0
    train(_network(world), 1)


def spawns(world: Communicator) -> None:
    """Two spawned processes, children of the first two ranks, that train together."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = gather(str(Path(folder, "store")), world)[0]
        if world.rank < 2:
            context = multiprocessing.get_context("spawn")
            child = context.Process(target=_spawned, args=(meeting, world.rank))
            child.start()
            train(_network(SingleProcess()), 1)
            child.join()
            assert child.exitcode == 0
            child.close()
        train(_network(world), 1)


def _spawned(meeting: str, rank: int) -> None:
    store, limit = dist.FileStore(meeting, 2), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    layer = SyncBatchNorm(3)
    layer(torch.full((2, 3), float(rank))).sum().backward()
    dist.barrier()  # rank 0 would take the file away
    dist.destroy_process_group()
    torch.testing.assert_close(layer.running_mean, torch.full((3,), 0.05))


def inits(world: Communicator) -> None:
    """The default process group destroyed and made anew, in a part of its store of its own."""
    train(_network(world), 1)
    init_anew(world)


def init_anew(world: Communicator) -> None:
    """Destroy the default process group, and make it again in the same store."""
    rank, size, store = world.rank, world.size, base_store()
    # torch itself finds the addresses of the group before in the same part of a store.
    number = store.add(f"round of {rank}", 1)
    dist.barrier()
    dist.destroy_process_group()
    part = dist.PrefixStore(f"round {number}", store)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=size)


def deeds_of(world: Communicator) -> tuple[Callable[[Communicator], None], ...]:
    """The deeds that can be done. MPI is initialised once in a process."""
    every = (steps, models, widths, groups, saves, forks)
    # The children import torch, which takes long where ranks outnumber the cores.
    some = (spawns,) if world.size <= 4 else ()
    return (*every, *some) if type(world).__name__ == "MPI" else (*every, *some, inits)


def _network(world: Communicator) -> nn.Module:
    norms = [SyncBatchNorm(C, process_group=world) for C in (16, 24)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), norms[0], nn.Conv2d(16, 24, 3), norms[1])


def train(model: nn.Module, steps: int) -> None:
    """Some training steps."""
    for _ in range(steps):
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
