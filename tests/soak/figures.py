"""What layers of many widths hold beside plain sums, and where the time of a start goes."""

import json
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from multibn.communicators import Communicator, as_communicator
from multibn.communicators.objects import gather
from multibn.torch_backend import SyncBatchNorm
from tests.soak.deeds import WIDTHS
from tests.soak.held import Held


def of_widths(world: Communicator) -> dict[str, list[float]]:
    """Descriptors, threads and MPI communicators: torch's or MPI's alone, and after more widths."""

    def most() -> list[float]:
        now = Held.now()
        rows = gather([now.descriptors, now.threads, now.communicators], world)
        return [max(column) for column in zip(*rows, strict=True)]

    for C in WIDTHS:
        _plain_sum(world, None, 2 * C)
    now = Held.now()
    alone = [now.descriptors, now.threads, now.communicators]
    counts = {"alone": [max(column) for column in zip(*gather(alone, world), strict=True)]}
    for count in (1, 40, 200):
        for C in WIDTHS[:count]:
            SyncBatchNorm(C, process_group=world)(torch.ones(2, C))
        counts[str(count)] = most()
    return counts


def _plain_sum(world: Communicator, group: Any, n: int) -> None:
    """A sum as a program without multibn would have it."""
    if type(world).__name__ == "MPI":
        (group or world.comm).Allreduce(np.ones(n), np.empty(n))  # type: ignore[attr-defined]
    else:
        dist.all_reduce(torch.ones(n), group=group)


def of_starts() -> dict[str, list[float]] | None:
    """Where the time of a job of many ranks goes: seconds until the last rank is there, and
    processor seconds of a rank, as a mean; on rank 0, of a process that has imported nothing."""
    began, stages = float(os.environ["SOAK_BEGAN"]), {}

    def reach(stage: str) -> None:
        stages[stage] = [time.time() - began, time.process_time()]

    reach("torch and multibn are imported")
    from mpi4py import MPI as mpi

    reach("MPI is initialised")
    world = as_communicator(mpi.COMM_WORLD)
    SyncBatchNorm(2, process_group=world)(torch.ones(2, 2))
    reach("the first message has arrived")
    for C in WIDTHS:
        SyncBatchNorm(C, process_group=world)(torch.ones(2, C))
    reach("200 layers of 200 widths have had a step")
    ranks = gather(list(stages.values()), world)
    table = np.array(ranks)
    means = np.stack([table[..., 0].max(0), table[..., 1].mean(0)], axis=-1).tolist()
    return dict(zip(stages, means, strict=True)) if world.rank == 0 else None


if __name__ == "__main__":
    if found := of_starts():
        print("figures " + json.dumps(found), flush=True)
