"""Polling with timeouts."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

# Waits at most the given seconds, and returns whether the collective is done.
Poll: TypeAlias = Callable[[float], bool]

_yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))


def poll(
    condition: Callable[[], bool],
    seconds: float,
    *,
    start: float = 0.0,
    spin_seconds: float = 0.0,
    max_sleep: float = 1e-3,
) -> bool:
    """Return whether `condition` becomes true within `seconds`; poll less and less often.

    Call sched_yield between polls until `spin_seconds` after `start`, when the wait began (default:
    now). Then sleep for a twentieth of the time waited so far, so that a late wake-up costs little.
    """
    now = time.monotonic()
    start, end = start or now, now + seconds
    while not condition():
        now = time.monotonic()
        if now >= end:
            return False
        waited = now - start
        if waited < spin_seconds:
            _yield_core()
        else:
            time.sleep(min(max(waited / 20, 5e-5), max_sleep, end - now))
    return True


def wait_for_key(store: Any, key: str) -> Poll:
    """Return a function that waits for a key of a torch.distributed store."""
    return partial(poll, lambda: store.check([key]), start=time.monotonic(), max_sleep=0.1)


def barrier(store: Any, size: int) -> Poll:
    """Register this rank, and return a function that waits for all. Call it once per prefix."""
    # All ranks wait for one key, which the last rank sets, instead of one key per rank.
    if store.add("number of ranks", 1) == size:
        store.set("all ranks", "")
    return wait_for_key(store, "all ranks")


def chain(steps: Iterator[Poll | None]) -> Poll:
    """Return a function that waits for several steps in turn, each begun after the one before.

    The first step begins at once. A step is None if it is already done.
    """

    def begin_next() -> Poll | None:
        return next(filter(None, steps), None)

    pending = begin_next()

    def wait(seconds: float) -> bool:
        nonlocal pending
        end = time.monotonic() + seconds
        while pending is not None:
            if not pending(max(end - time.monotonic(), 0.0)):
                return False
            pending = begin_next()
        return True

    return wait


def spin_seconds(num_ranks: int = 1) -> float:
    """How long a waiting rank spins (sched_yield) before it sleeps.

    Shorter if the ranks of a machine outnumber its cores, so that a spinning rank delays no other.
    """
    # The variables of torchrun, of Open MPI, and of MPICH and Intel MPI.
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    num_ranks = max(num_ranks, *(int(os.environ.get(name) or 1) for name in names))
    # Only Linux reports the cores on which a process may run.
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return 2e-4 if num_ranks > len(cores) else 0.1
