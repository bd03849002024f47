"""Status notices in torch.distributed's store, and the part of that store for one group."""

import json
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from typing import Any

import torch.distributed as dist

from multibn.communicators.exit import after_fork
from multibn.communicators.watchdog import Status

_READ_SECONDS = 0.3  # of waiting for the store's answer to a read
_WRITE_SECONDS = 2.0  # of waiting for a write, so that other ranks learn why this one fails
_EXIT_SECONDS = 15.0  # of waiting at exit: TCP is slow to notice that a network is back
# One counter holds the number of ranks that have published a notice, plus this constant times the
# number of all notices published. A rank that finds the counter unchanged reads nothing else.
_WRITE_STEP = 2**24
_COUNTER = "notices"


def part_of_store(store: dist.Store, name: str, size: int) -> dist.Store:
    """Return the part of `store` for one group of `size` ranks. Each rank calls it once per group.

    torchrun restarts ranks with the same store, and a new group may have the name of a destroyed
    one. So the number of calls, over all ranks, is part of the prefix. A rank's own count of groups
    would not do, since it may differ between ranks.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    named = dist.PrefixStore(f"multibn/{name}/{size}/{attempt}", store)
    return dist.PrefixStore(f"{(named.add('arrivals', 1) - 1) // size}", named)


class StoreStatusBoard:
    """A `StatusBoard` in a torch.distributed store."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._notices: dict[int, Status] = {}
        self._number = 0  # of this rank's entry in the store; 0 before its first notice
        self._count = 0  # the counter at the last read
        self._host_ended = False  # whether the process that hosts the store is gone

    def publish(self, notice: Status, /) -> None:
        text = json.dumps((self._rank, notice))
        self._ask(lambda: self._publish(text), must=True)

    def read(self) -> dict[int, Status]:
        self._ask(self._read)
        return dict(self._notices)

    def clear(self, size: int) -> None:
        """Delete the group's keys if this is the last of `size` ranks to call this method."""

        def delete() -> None:
            if self._store.add("let go", 1) == size:
                for key in getattr(self._store, "list_keys", list)():  # only in newer torch
                    self._store.delete_key(key)

        self._ask(delete, must=True)

    def finish(self) -> None:
        _store_thread().finish()

    def _ask(self, task: Callable[[], object], *, must: bool = False) -> None:
        def unless_ended() -> None:
            if not self._host_ended:
                try:
                    task()
                except RuntimeError:  # torch would print a trace for each further request
                    self._host_ended = True

        _store_thread().ask(unless_ended, must=must)

    def _publish(self, text: str) -> None:
        if not self._number:
            self._number = self._store.add(_COUNTER, 1) % _WRITE_STEP
        self._store.set(f"notice {self._number}", text)
        self._store.add(_COUNTER, _WRITE_STEP)

    def _read(self) -> None:
        count = self._store.add(_COUNTER, 0)
        if count == self._count:
            return
        others = (n for n in range(1, count % _WRITE_STEP + 1) if n != self._number)
        keys = [f"notice {n}" for n in others]
        if keys and not self._store.check(keys):  # one is being written
            keys = [key for key in keys if self._store.check([key])]
        else:
            self._count = count
        for text in self._store.multi_get(keys) if keys else ():
            rank, notice = json.loads(text)
            self._notices[rank] = Status(*notice)


class _StoreThread:
    """A thread for requests to stores, which block without a deadline if the network is broken.

    The thread lives as long as the process, because Python (since 3.12) starts no thread at exit.
    `finish` waits for it: a thread that returns from the store during exit would abort the process.
    """

    def __init__(self) -> None:
        self._tasks: Any = queue.SimpleQueue()  # of (function, its Future)
        self._latest: Future[None] = Future()
        self._latest.set_result(None)
        self._lock = threading.RLock()  # reentrant: garbage collection may clear another board
        threading.Thread(target=self._run, daemon=True, name="multibn-store").start()

    def ask(self, task: Callable[[], object], *, must: bool = False) -> None:
        """Run `task` in the thread, and wait briefly. Skip it if one is pending, unless `must`."""
        with self._lock:
            is_busy = not self._latest.done()
            if is_busy and not must:
                return
            answered: Future[None] = Future()
            self._tasks.put((task, answered))
            self._latest = answered
        wait([answered], _WRITE_SECONDS if must and not is_busy else _READ_SECONDS)

    def finish(self) -> None:
        """Wait for the answers to all tasks."""
        wait([self._latest], _EXIT_SECONDS)

    def _run(self) -> None:
        while True:
            task, answered = self._tasks.get()
            task()
            del task  # keeps the store of a destroyed group alive
            answered.set_result(None)


@cache
def _store_thread() -> _StoreThread:
    return _StoreThread()


# A forked child does not have its parent's thread, and may create its own group.
after_fork(_store_thread.cache_clear)
