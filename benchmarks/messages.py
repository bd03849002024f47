"""One layer's message with all its checks, beside the bare allreduce of the same numbers."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.collectives import repeated
from benchmarks.timing import Seconds, Step, take_turns
from multibn import Communicator, message
from multibn.communicators.conversation import Conversation

_REPEAT = {"mpi": 50, "shared memory": 50, "gloo": 10}


def measure(
    communicator: Communicator, over: str, channels: Sequence[int], seconds: float
) -> tuple[dict[str, Seconds], dict[str, Any]]:
    """Seconds of one message under the name "C/checked" or "C/bare"; `over` is a key of _REPEAT."""
    os.environ["MULTIBN_SHARED_MEMORY"] = str(int(over == "shared memory"))
    times: dict[str, Seconds] = {}
    for C in channels:
        layer = Conversation(communicator, lambda C=C: f"layer of {C} channels")  # type: ignore[misc]
        steps = {
            "checked": _checked(layer, message.length(C)),
            "bare": _bare(over, message.length(C)),
        }
        steps = {name: repeated(step, _REPEAT[over]) for name, step in steps.items()}
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{C}/{name}": t / _REPEAT[over] for name, t in taken.items()}
    return times, {}


def _checked(layer: Conversation, n: int) -> Step:
    phase = layer.during("forward", np.dtype(np.float32))

    def step() -> None:
        payload = phase.buffer(n)
        if payload is None:  # one rank
            payload = np.empty(n)
        payload[:] = 1
        phase.allreduce(payload)

    return step


def _bare(over: str, n: int) -> Step:
    if over == "mpi":
        from mpi4py import MPI

        numbers, total = np.zeros(n), np.empty(n)
        return lambda: MPI.COMM_WORLD.Allreduce(numbers, total)
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(n, dtype=torch.float64)
    return lambda: dist.all_reduce(tensor)
