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
_inherited_group: object = None  # in a forked child: the parent's default group of torch
_inherits_mpi = False  # in a forked child: whether the parent had initialised MPI


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
    global _inherited_group, _inherits_mpi
    group = getattr(sys.modules.get("torch.distributed"), "group", None)
    _inherited_group = None if group is None else group.WORLD
    mpi = sys.modules.get("mpi4py.MPI")
    _inherits_mpi = mpi is not None and mpi.Is_initialized()
    for channel in list(watched_channels):
        channel.abandon_after_fork()


after_fork(_after_fork)


def is_fork_of_mpi() -> bool:
    """Whether this process was forked after MPI was initialised."""
    return _inherits_mpi


def is_fork_of_torch(group: object) -> bool:
    """Whether this process was forked while `group` was torch's default process group."""
    return group is not None and group is _inherited_group
