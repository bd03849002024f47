"""The end of a process, and its forks: no rank may be left to wait, or be spoken for by a child."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from multibn.communicators.diagnostics import uncaught

GLOO_REST_SECONDS = 0.2  # on an idle machine a hundredth is enough

watched_channels: WeakSet[Any] = WeakSet()  # the `Channel`s whose ranks may wait for this process
_inherited_group: object = None  # in a forked child: the parent's default group of torch
_inherits_mpi = False  # in a forked child: whether the parent had initialised MPI


def watch(channel: Any) -> None:
    """Tell the other ranks of a channel when this process ends."""
    _leave_at_exit()
    watched_channels.add(channel)


@cache
def _leave_at_exit() -> None:
    # At the first use and not before: handlers run last in, first out, and this one needs the
    # libraries that move bytes.
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
def rest_at_exit() -> None:
    """Leave Python's lock to gloo's threads, which may have tensors of the program to release.

    While the interpreter ends, Python (before 3.14) unwinds a thread that needs the lock, which C++
    takes for an error: the process would be aborted after all its work.
    """
    atexit.register(time.sleep, GLOO_REST_SECONDS)


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


def is_fork(default_group: object = None) -> bool:
    """Whether this process is a fork of a rank of torch's `default_group`; of MPI if None."""
    if default_group is None:
        return _inherits_mpi
    return default_group is _inherited_group
