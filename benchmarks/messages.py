"""Times of a layer's forward message with all its checks, beside the bare allreduce."""

import os
from collections.abc import Sequence

from benchmarks.worker import Measured
from multibn import Communicator
from multibn.check.timing import Seconds, message_steps, take_turns

# Calls in a timed step: a single call takes microseconds, too little for the clock.
_REPEAT = {"mpi": 20, "shared memory": 20, "gloo": 2}


def measure(
    communicator: Communicator, over: str, channels: Sequence[int], seconds: float
) -> Measured:
    """Seconds per call under "C/checked" and "C/bare"; the latter is MPI's own or torch's."""
    os.environ["MULTIBN_SHARED_MEMORY"] = str(int(over == "shared memory"))
    times: dict[str, Seconds] = {}
    for C in channels:
        steps = message_steps(communicator, C, repeat=_REPEAT[over])
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{C}/{name}": t / _REPEAT[over] for name, t in taken.items()}
    return times, {}
