"""One rank of `make soak`: what it holds with layers of many widths, and by its deeds."""

import resource
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.worker import Measured
from multibn.communicators import Communicator
from multibn.communicators.communicator import gather
from multibn.torch_backend import SyncBatchNorm
from tests.soak.deeds import WIDTHS, deeds_of, hold
from tests.soak.held import Held

_DESCRIPTORS = 128  # a limit that other programs run under, for 2 ranks


def measure(world: Communicator, seconds: float) -> Measured:
    """Notes: a row for each deed, and what many widths hold. Collective."""
    for i in range(200_000):  # Python's table of names doubles once, by 4 MB: not in a deed
        sys.intern(f"name {i}")
    results: dict[str, Any] = {}
    if world.size == 2:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, most))
    if world.size < 32:
        results["widths"] = _of_widths(world)
    deeds = deeds_of(world)
    results["rows"] = [hold(deed, world, seconds / len(deeds)) for deed in deeds]
    return {}, results


def _of_widths(world: Communicator) -> dict[str, list[float]]:
    """Descriptors, threads and MPI communicators: torch's or MPI's alone, and after more widths."""

    def most() -> list[float]:
        now = Held.now()
        rows = gather([now.descriptors, now.threads, now.communicators], world)
        return [max(column) for column in zip(*rows, strict=True)]

    for C in WIDTHS:  # sums as a program without multibn would have them
        if type(world).__name__ == "MPI":
            world.mpi_comm.Allreduce(np.ones(2 * C), np.empty(2 * C))  # type: ignore[attr-defined]
        else:
            dist.all_reduce(torch.ones(2 * C))
    counts = {"alone": most()}
    for count in (1, 40, 200):
        for C in WIDTHS[:count]:
            SyncBatchNorm(C, process_group=world)(torch.ones(2, C))
        counts[str(count)] = most()
    return counts
