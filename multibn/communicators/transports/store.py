"""Notices over torch.distributed's store, which the ranks have met in."""

import contextlib
import queue
import threading
from collections.abc import Callable
from functools import cache

import torch.distributed as dist

from multibn.communicators.watch import Notice

_ANSWER = 0.3  # seconds to wait for a store's answer
_LAST_ANSWER = 15.0  # at the end of the process: TCP is slow to notice that a network is back


class StoreBoard:
    """Notices as entries of a store of torch.distributed."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._others = [r for r in range(size) if r != rank]
        self._rank = rank
        self._notices: dict[int, Notice] = {}
        self._published = False

    def publish(self, notice: Notice, /) -> None:
        text = notice.encode().decode()
        self._published = True
        _messenger().ask(lambda: self._store.set(f"notice of {self._rank}", text), must=True)

    def read(self) -> dict[int, Notice]:
        _messenger().ask(self._read)
        return dict(self._notices)

    def close(self) -> None:
        _messenger().finish()

    def withdraw(self) -> None:
        """Remove this rank's notice: a later group may use the store, and have the same name."""
        if self._published:
            _messenger().ask(lambda: self._store.delete_key(f"notice of {self._rank}"), must=True)

    def _read(self) -> None:
        for rank in self._others:
            key = f"notice of {rank}"
            if self._store.check([key]):
                self._notices[rank] = Notice.decode(self._store.get(key))


class _Messenger:
    """A thread that asks stores: one beyond a broken network gives no answer, without a deadline.

    The thread lives as long as the process. While the interpreter ends, Python starts no thread
    (since 3.12), and a thread that came back from the store then would abort the process.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._unanswered = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="multibn-store").start()

    def ask(self, task: Callable[[], object], *, must: bool = False) -> None:
        """Run `task` and wait a little for its end. While another waits, only if it `must`."""
        with self._changed:
            if self._unanswered and not must:
                return
            self._unanswered += 1
            self._tasks.put(task)
            self._changed.wait_for(lambda: not self._unanswered, _ANSWER)

    def finish(self) -> None:
        """Wait for all answers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered, _LAST_ANSWER)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
                task()
            del task
            with self._changed:
                self._unanswered -= 1
                self._changed.notify_all()


@cache
def _messenger() -> _Messenger:
    return _Messenger()
