"""Figures of what grew once, beside plain torch's: with widths, ranks, groups and 16-bit inputs."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from multibn import SingleProcess
from multibn.communicators import Communicator, as_communicator
from multibn.communicators.objects import gather
from multibn.torch_backend import SyncBatchNorm
from tests.soak.deeds import WIDTHS, destroy, init_anew, new_group
from tests.soak.held import Held, store_keys

NUM_GROUPS = 200
NUM_ROUNDS = 10
_SIXTEEN_BITS = (2, 64, 2048, 2048)  # 1.07 GB of float16


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


def of_groups(world: Communicator, *, plain: bool) -> dict[str, float]:
    """What a rank holds more after 200 groups, each used and destroyed."""
    before = Held.now()
    for number in range(NUM_GROUPS + 1):
        if number == 1:
            before = Held.now()
        group = new_group(world)
        if plain:
            _plain_sum(world, group, 6)
        else:
            SyncBatchNorm(2, process_group=as_communicator(group))(torch.ones(2, 2))
        destroy(group)
        del group
    after = Held.now()
    return {
        "descriptors": after.descriptors,
        "threads": after.threads,
        "kB a group": 1e3 * (after.megabytes - before.megabytes) / NUM_GROUPS,
    }


def of_rounds(world: Communicator, *, plain: bool) -> float:
    """Keys that an init and destroy of the default process group leaves in its store."""
    before = store_keys()
    for _ in range(NUM_ROUNDS):
        if not plain:
            SyncBatchNorm(2, process_group=world)(torch.ones(2, 2))
        init_anew(world)
    dist.barrier()
    return (store_keys() - before) / NUM_ROUNDS


def _plain_sum(world: Communicator, group: Any, n: int) -> None:
    """A sum as a program without multibn would have it."""
    if type(world).__name__ == "MPI":
        (group or world.comm).Allreduce(np.ones(n), np.empty(n))  # type: ignore[attr-defined]
    else:
        dist.all_reduce(torch.ones(n), group=group)


def of_sixteen_bits(kind: str) -> dict[str, float]:
    """The peak of a forward pass in training, in units of the input's bytes, without the input."""
    layer: nn.Module
    if kind == "torch":
        layer = nn.BatchNorm2d(_SIXTEEN_BITS[1])
    else:
        layer = SyncBatchNorm(_SIXTEEN_BITS[1], process_group=SingleProcess())
    layer.to(torch.float16)
    layer(torch.ones(2, _SIXTEEN_BITS[1], 8, 8, dtype=torch.float16))
    x = torch.ones(_SIXTEEN_BITS, dtype=torch.float16)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.process_time()
    with torch.no_grad():
        layer(x)
    seconds = time.process_time() - start
    return {"peak": 1 + (_resident("VmHWM") - before) / x.nbytes, "seconds": seconds}


def _resident(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


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
    found: Any = of_starts() if sys.argv[1] == "starts" else of_sixteen_bits(sys.argv[1])
    if found is not None:
        print("figures " + json.dumps(found), flush=True)
