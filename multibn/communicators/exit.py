"""Exit and fork handlers: no rank waits for an exited process, and no child acts as a rank."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from multibn.communicators.diagnostics import uncaught

_GIL_RELEASE_SECONDS = 0.2  # at exit; an idle machine needs 0.002

watched_channels: WeakSet[Any] = WeakSet()  # the `Channel`s whose ranks may wait for this process
# In a forked child: the parent's default process group of torch, and "mpi" if MPI was initialized.
inherited: set[object] = set()


def watch(channel: Any) -> None:
    """Make this process notify the other ranks of the channel when it ends."""
    # Handlers run last in, first out. Register this one again, so that it runs before the handlers
    # of the transport's library, which may have been imported since.
    atexit.unregister(_leave)
    atexit.register(_leave)
    watched_channels.add(channel)


def _leave() -> None:
    channels = list(watched_channels)
    error = uncaught()
    failed = error is not None or any(channel.watchdog.failure for channel in channels)
    for channel in channels:
        channel.watchdog.close(error)
    for channel in channels:
        channel.transport.close(failed=channel.watchdog.failure is not None, at_exit=True)
    for channel in channels:
        channel.transport.end_process(failed=failed)


@cache
def release_gil_at_exit() -> None:
    """Release the GIL for a moment at exit: gloo's threads may still have tensors to free.

    Before Python 3.14, a thread that requests the GIL during interpreter shutdown is unwound. In
    C++ code, this aborts the process, although its work is done.
    """
    atexit.register(time.sleep, _GIL_RELEASE_SECONDS)


def after_fork(function: Callable[[], object]) -> None:
    """Call `function` in each forked child of this process, if the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _after_fork() -> None:
    distributed, mpi = sys.modules.get("torch.distributed"), sys.modules.get("mpi4py.MPI")
    if (group := getattr(distributed, "group", None)) is not None:
        inherited.add(group.WORLD)
    if mpi is not None and mpi.Is_initialized():
        inherited.add("mpi")
    for channel in list(watched_channels):
        channel.abandon_after_fork()


after_fork(_after_fork)
