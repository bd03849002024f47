"""Polling with timeouts."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

# Waits so many seconds at most, and says whether the collective is done.
Poll: TypeAlias = Callable[[float], bool]

_offer_core = getattr(os, "sched_yield", partial(time.sleep, 0))


def poll(
    condition: Callable[[], bool],
    seconds: float,
    *,
    begun: float = 0.0,
    spin_seconds: float = 0.0,
    longest: float = 1e-3,
) -> bool:
    """Whether `condition` becomes true within that time; asks ever less often.

    Calls sched_yield for the first `spin_seconds` since the wait has `begun` (default: now), then
    sleeps for a twentieth of the time waited so far, so that waking late costs little.
    """
    start = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now - start >= seconds:
            return False
        waited = now - (begun or start)
        if waited < spin_seconds:
            _offer_core()
        else:
            time.sleep(min(max(waited / 20, 5e-5), longest, start + seconds - now))
    return True


def wait_for_key(store: Any, key: str) -> Poll:
    """Waits for a key of a store of torch.distributed."""
    return partial(poll, lambda: store.check([key]), begun=time.monotonic(), longest=0.1)


def barrier(store: Any, size: int) -> Poll:
    """Barrier over a store: register this rank, then wait for all. Once in each prefix."""
    # One key says that all have come, and not as many as there are ranks.
    if store.add("number of ranks", 1) == size:
        store.set("all ranks", "")
    return wait_for_key(store, "all ranks")


def chain(steps: Iterator[Poll | None]) -> Poll:
    """Begin the first of several steps; wait for that one, begin the next, and so on.

    A step is None where nothing is to be waited for.
    """

    def begin_next() -> Poll | None:
        return next(filter(None, steps), None)

    pending = begin_next()

    def done(seconds: float) -> bool:
        nonlocal pending
        end = time.monotonic() + seconds
        while pending is not None:
            if not pending(max(end - time.monotonic(), 0.0)):
                return False
            pending = begin_next()
        return True

    return done
