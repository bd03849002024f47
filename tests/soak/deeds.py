"""What a long run does again and again, and what a rank holds before and after."""

import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from multibn import SingleProcess
from multibn.communicators import Communicator, _lines, as_communicator
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm

_WIDTHS = range(3, 1603, 8)  # 200 of them
_MEMORY = 16.0  # MB by which a rank may grow: the allocator's


class Held(NamedTuple):
    """What this process holds."""

    megabytes: float
    descriptors: int
    threads: int
    lines: int  # groups with lines
    duplicates: int  # of MPI communicators, over all of these groups

    @classmethod
    def now(cls) -> "Held":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        transports: list[Any] = [lines.transport for lines in _lines._all_lines]
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(transports),
            sum(len(getattr(transport, "duplicates", ())) for transport in transports),
        )

    def growth(self, before: "Held") -> str:
        """What has grown since, or ""."""
        if self.megabytes > before.megabytes + _MEMORY or self[1:] > before[1:]:
            return f"{before} became {self}"
        return ""


class Row(NamedTuple):
    """One deed, done many times: what this rank held after the first half, and at the end."""

    deed: str
    times: int
    before: Held
    after: Held


def hold(deed: Callable[[Communicator], None], world: Communicator, seconds: float) -> Row:
    """Do `deed` for so long on all ranks, but 4 times at least. Collective."""
    start, times, before = time.monotonic(), 0, Held.now()
    half = False
    while True:
        deed(world)
        times += 1
        share = (time.monotonic() - start) / seconds
        # All ranks must take the same number of turns.
        mean = float(world.allreduce(np.array([share]))[0]) / world.size
        if not half and times >= 2 and mean >= 0.5:
            half, before = True, Held.now()
        elif half and times >= 4 and mean >= 1:
            return Row(deed.__name__, times, before, Held.now())


def steps(world: Communicator) -> None:
    """Training steps of one network."""
    _train(_network(world), 5)


def models(world: Communicator) -> None:
    """Models built, converted, trained and dropped."""
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.BatchNorm2d(24))
    _train(convert_sync_batchnorm(model, process_group=world), 1)


def widths(world: Communicator) -> None:
    """200 layers of as many widths."""
    for C in _WIDTHS:
        SyncBatchNorm(C, process_group=world)(torch.ones(2, C))


def groups(world: Communicator) -> None:
    """A group made, used and destroyed."""
    if type(world).__name__ == "TorchDistributed":
        import torch.distributed as dist

        group: Any = dist.new_group(list(range(world.size)))
    else:
        group = world.comm.Dup()  # type: ignore[attr-defined]
    _train(_network(as_communicator(group)), 1)
    if type(world).__name__ == "TorchDistributed":
        dist.destroy_process_group(group)
    else:
        group.Free()


def saves(world: Communicator) -> None:
    """A model saved, loaded and trained."""
    file = io.BytesIO()
    model = _network(world)
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    _train(pickle.loads(pickle.dumps(model)), 1)


def forks(world: Communicator) -> None:
    """A forked child with a layer of its own, and a program in a new process."""
    _train(_network(world), 1)
    child = os.fork()
    if child == 0:
        layer = SyncBatchNorm(3, process_group=SingleProcess())
        os._exit(0 if layer(torch.ones(2, 3)).isfinite().all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    if world.rank == 0:
        subprocess.run([sys.executable, "-c", "import multibn"], check=True)
    _train(_network(world), 1)


def inits(world: Communicator) -> None:
    """The default process group destroyed and made anew, in a part of its store of its own."""
    import torch.distributed as dist

    rank, size = world.rank, world.size
    _train(_network(world), 1)
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    # torch itself finds the addresses of the group before in the same part of a store.
    number = store.add(f"round of {rank}", 1)
    dist.barrier()
    dist.destroy_process_group()
    part = dist.PrefixStore(f"round {number}", store)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=size)


DEEDS = (steps, models, widths, groups, saves, forks, inits)


def _network(world: Communicator) -> nn.Module:
    norms = [SyncBatchNorm(C, process_group=world) for C in (16, 24)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), norms[0], nn.Conv2d(16, 24, 3), norms[1])


def _train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
