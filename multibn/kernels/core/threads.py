"""Threads for large arrays: how a pass is divided into tasks, and who runs them.

How a sum is cut into parts depends on the shape alone, so its value does not depend on the number
of threads, which is torch's, or OMP_NUM_THREADS where torch is not loaded.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, lru_cache
from typing import Any

SHARE = 1 << 19  # elements that are worth a thread
_WIDE = 1 << 16  # elements of a sample from which threads divide the channels, not the samples
_PARTS = 64  # a sum over samples has at most so many parts


@lru_cache(maxsize=1024)
def sum_tasks(sizes: tuple[int, int, int], threads: int) -> Sequence[tuple[int, ...]]:
    """Tasks `(parts, first, step, c0, c1)`, at most one for each thread."""
    N, C, S = sizes
    worth = max(N * C * S // SHARE, 1)
    if C * S >= _WIDE:
        return [(1, 0, 1, a, b) for a, b in _cuts(C, min(threads, worth))]
    parts = min(_PARTS, worth, N)
    step = min(threads, parts)
    return [(parts, first, step, 0, C) for first in range(step)]


@lru_cache(maxsize=1024)
def tasks(sizes: tuple[int, int, int], threads: int) -> Sequence[tuple[int, ...]]:
    """Tasks `(n0, n1, c0, c1)`, at most one for each thread."""
    N, C, S = sizes
    shares = min(threads, max(N * C * S // SHARE, 1))
    if C * S >= _WIDE:
        return [(0, N, a, b) for a, b in _cuts(C, shares)]
    return [(a, b, 0, C) for a, b in _cuts(N, shares)]


def _cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """Starts and ends of at most `parts` parts of `range(n)`, none of them empty."""
    parts = min(n, parts)
    return [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def run(loop: Callable[..., Any], arguments: tuple[Any, ...], tasks: Sequence[Any]) -> None:
    """Run the loop for each task, its last argument, on one thread per task."""
    first, *rest = tasks
    running: list[Future[Any]] = []
    try:
        for task in rest:
            running.append(_pool().submit(loop, *arguments, task))
        loop(*arguments, first)
        for other in running:
            other.result()
    except BaseException:  # Ctrl-C, for example: the threads write to memory of the caller
        wait(running)
        raise


def num_threads() -> int:
    """Threads to use for a large array."""
    if not threading.main_thread().is_alive():  # the program ends, and no thread can be started
        return 1
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(asked), 1) if asked.isdigit() else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="multibn")


if hasattr(os, "register_at_fork"):  # a forked process has the pool but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
