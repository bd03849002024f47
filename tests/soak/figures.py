"""Where the time of a start of many ranks goes."""

import json
import os
import time

import numpy as np
import torch

from multibn.communicators import as_communicator
from multibn.communicators.objects import gather
from multibn.torch_backend import SyncBatchNorm
from tests.soak.deeds import WIDTHS


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
