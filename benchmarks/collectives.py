"""Times of the messages of one layer's forward pass: one allreduce against one all_gather.

Four ways to share the statistics of C channels: "allreduce" and "all_gather" over all ranks,
"grouped" (an allreduce in every pair of ranks) and "hierarchical" (to the first rank of every
pair, an allreduce over the first ranks, and back).
"""

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.scaling import GROUP
from benchmarks.timing import Measured, Seconds, Step, take_turns
from multibn import Communicator, message
from multibn.communicators.conversation import Conversation

# Calls in a timed step: a single call takes microseconds, too little for the clock.
_REPEAT = {"mpi": 20, "shared memory": 20, "gloo": 2}


def measure(
    communicator: Communicator, over: str, channels: Sequence[int], seconds: float
) -> Measured:
    """Seconds per call under the name "C/way"; `over` is "mpi" or "gloo"."""
    make = {"mpi": _mpi_steps, "gloo": _gloo_steps}[over](communicator.rank)
    return _timed(make, communicator, over, channels, seconds), {}


def measure_checks(
    communicator: Communicator, over: str, channels: Sequence[int], seconds: float
) -> Measured:
    """Seconds of a layer's message with all its checks, "checked", and of the "bare" allreduce."""
    os.environ["MULTIBN_SHARED_MEMORY"] = str(int(over == "shared memory"))
    bare = (_mpi_steps if over == "mpi" else _gloo_steps)(communicator.rank)

    def make(C: int) -> dict[str, Step]:
        layer = Conversation(communicator, lambda: f"layer of {C} channels")
        return {
            "checked": _checked(layer, message.length(C)),
            "bare": bare(C)["allreduce"],
        }

    return _timed(make, communicator, over, channels, seconds), {}


def _timed(
    make: Callable[[int], Mapping[str, Step]],
    communicator: Communicator,
    over: str,
    channels: Sequence[int],
    seconds: float,
) -> dict[str, Seconds]:
    times: dict[str, Seconds] = {}
    for C in channels:
        steps = {name: _repeated(step, _REPEAT[over]) for name, step in make(C).items()}
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{C}/{name}": t / _REPEAT[over] for name, t in taken.items()}
    return times


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


def _mpi_steps(rank: int) -> Callable[[int], dict[str, Step]]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    group = world.Split(rank // GROUP)
    leaders = world.Split(rank % GROUP)

    def steps(C: int) -> dict[str, Step]:
        sums = np.zeros(message.length(C))
        total = np.empty_like(sums)
        moments = np.zeros(2 * C + 1, np.float32)
        gathered = np.empty((world.size, 2 * C + 1), np.float32)

        def hierarchical() -> None:
            group.Reduce(sums, total)
            if group.rank == 0:
                leaders.Allreduce(MPI.IN_PLACE, total)
            group.Bcast(total)

        return {
            "allreduce": lambda: world.Allreduce(sums, total),
            "all_gather": lambda: world.Allgather(moments, gathered),
            "grouped": lambda: group.Allreduce(sums, total),
            "hierarchical": hierarchical,
        }

    return steps


def _gloo_steps(rank: int) -> Callable[[int], dict[str, Step]]:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    # `new_group` is collective over the world: every rank makes every group, its own or not.
    groups = [dist.new_group(list(range(i, i + GROUP))) for i in range(0, size, GROUP)]
    peers = [dist.new_group(list(range(i, size, GROUP))) for i in range(GROUP)]
    group, first, leaders = groups[rank // GROUP], rank - rank % GROUP, peers[0]

    def steps(C: int) -> dict[str, Step]:
        sums = torch.zeros(message.length(C), dtype=torch.float64)
        moments = torch.zeros(2 * C + 1)
        gathered = [torch.empty_like(moments) for _ in range(size)]

        def hierarchical() -> None:
            dist.reduce(sums, first, group=group)
            if rank == first:
                dist.all_reduce(sums, group=leaders)
            dist.broadcast(sums, first, group=group)

        return {
            "allreduce": lambda: dist.all_reduce(sums),
            "all_gather": lambda: dist.all_gather(gathered, moments),
            "grouped": lambda: dist.all_reduce(sums, group=group),
            "hierarchical": hierarchical,
        }

    return steps
