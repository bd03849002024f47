"""What happens at exit and after a fork: no rank waits in vain, and no child acts as a rank."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from multibn.communicators.diagnostics import uncaught

_GLOO_SECONDS = 0.2  # on an idle machine 0.002 is enough

watched_channels: WeakSet[Any] = WeakSet()  # the `Channel`s whose ranks may wait for this process
# In a forked child: the parent's default group of torch, and "mpi" if that had been initialised.
inherited: set[object] = set()


def watch(channel: Any) -> None:
    """Tell the other ranks of a channel when this process ends."""
    _leave_at_exit()
    watched_channels.add(channel)


@cache
def _leave_at_exit() -> None:
    # At the first use, after the library that moves bytes has registered its own handler: handlers
    # run last in, first out, so that this one runs while the library still works.
    atexit.register(_leave)


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

    Before Python 3.14, the ending interpreter unwinds a thread that asks for the GIL. C++ treats
    this as an error, and aborts the process after its work is done.
    """
    atexit.register(time.sleep, _GLOO_SECONDS)


def after_fork(function: Callable[[], object]) -> None:
    """Call `function` in each forked child of this process, where the system has forks."""
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
