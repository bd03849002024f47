"""Handlers for exit and fork: no rank waits for an exited one, and no child acts as a rank."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from multibn.communicators.diagnostics import uncaught

_GLOO_SECONDS = 0.2  # 0.002 is enough on an idle machine

watched_channels: WeakSet[Any] = WeakSet()  # the `Channel`s whose ranks may wait for this process
# In a forked child: torch's default process group of the parent, and "mpi" if MPI was initialized.
inherited: set[object] = set()


def watch(channel: Any) -> None:
    """Notify the other ranks of a channel when this process ends."""
    # Handlers run last in, first out: this one must run while the transport's library still works,
    # before the library's own handler.
    atexit.unregister(_leave)
    atexit.register(_leave)
    watched_channels.add(channel)


def _leave() -> None:
    every = list(watched_channels)
    error = uncaught()
    failed = error is not None or any(channel.watchdog.failure for channel in every)
    for channel in every:
        channel.watchdog.close(error)
    for channel in every:
        channel.transport.close(failed=channel.watchdog.failure is not None, at_exit=True)
    for channel in every:
        channel.transport.end_process(failed=failed)


@cache
def release_gil_at_exit() -> None:
    """Release the GIL for a moment at exit: gloo's threads may still have tensors to free.

    Before Python 3.14, an interpreter that shuts down unwinds a thread that requests the GIL. For
    C++ this is an error, and the process aborts although its work is done.
    """
    atexit.register(time.sleep, _GLOO_SECONDS)


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
