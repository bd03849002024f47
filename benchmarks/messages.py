"""Times of a layer's forward message with all its checks, beside the bare allreduce."""

import os
from collections.abc import Sequence

import numpy as np

from benchmarks.timing import Measured, Seconds, Step, take_turns
from multibn import Communicator, message
from multibn.communicators.conversation import Conversation

# Calls in a timed step: a single call takes microseconds, too little for the clock.
_REPEAT = {"mpi": 20, "shared memory": 20, "gloo": 2}


def measure(
    communicator: Communicator, over: str, channels: Sequence[int], seconds: float
) -> Measured:
    """Seconds per call under "C/checked" and "C/bare"; the latter is MPI's own or torch's."""
    os.environ["MULTIBN_SHARED_MEMORY"] = str(int(over == "shared memory"))
    times: dict[str, Seconds] = {}
    for C in channels:
        layer = Conversation(communicator, lambda C=C: f"layer of {C} channels")  # type: ignore[misc]
        bare = _mpi if over == "mpi" else _torch
        steps = {"checked": _checked(layer, message.forward_payload(C))}
        steps["bare"] = bare(message.length(C))
        steps = {name: _repeated(step, _REPEAT[over]) for name, step in steps.items()}
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{C}/{name}": t / _REPEAT[over] for name, t in taken.items()}
    return times, {}


def _repeated(step: Step, n: int) -> Step:
    def run() -> None:
        for _ in range(n):
            step()

    return run


def _checked(layer: Conversation, n: int) -> Step:
    phase = layer.during("forward", np.dtype(np.float32))

    def step() -> None:
        payload = phase.buffer(n)
        if payload is None:  # one rank
            payload = np.empty(n)
        payload[:] = 1
        phase.allreduce(payload)

    return step


def _mpi(n: int) -> Step:
    from mpi4py import MPI

    sums = np.zeros(n)
    total = np.empty_like(sums)
    return lambda: MPI.COMM_WORLD.Allreduce(sums, total)


def _torch(n: int) -> Step:
    import torch
    import torch.distributed as dist

    sums = torch.zeros(n, dtype=torch.float64)
    return lambda: dist.all_reduce(sums)
