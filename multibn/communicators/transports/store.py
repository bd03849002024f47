"""Notices over torch.distributed's store, which the ranks have met in.

A store may outlive a run: torchrun starts ranks again over the same one. So nothing that stands
there is believed unless it is known to be of this run.
"""

import json
import os
import queue
import secrets
import threading
from collections.abc import Callable, Collection, Generator
from functools import cache, partial

import torch.distributed as dist

from multibn._platform import pid_space, process_start, process_state, seconds_since_boot
from multibn.communicators.channel import after_fork
from multibn.communicators.polling import Poll, poll, until, until_all_come
from multibn.communicators.status_board import Status

_ANSWER = 0.3  # seconds to wait for a store's answer
_SURE_ANSWER = 2.0  # before an error, which would name a rank that has ended and not its reason
_LAST_ANSWER = 15.0  # at the end of the process: TCP is slow to notice that a network is back
# One counter tells how many ranks have notices and, in steps of this number, how often any rank has
# written one. A look that finds the counter as it was asks for nothing else.
_WRITTEN = 2**24
_COUNTER = "notices"


def meet(store: dist.Store, rank: int, size: int) -> Generator[Poll, None, dist.Store]:
    """Ends when all ranks have come; returns a part of the store that no other run has used.

    Rank 0 chooses the name of that part, and tells each process by a token that is this process's
    alone.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        run, unread, read = dist.PrefixStore(token, store), set[int](), 0

        def is_over() -> bool:
            nonlocal read, unread
            come = store.add("processes", 0)
            unread |= {*range(read + 1, come + 1)}
            read = come
            for number in sorted(unread):
                if store.check([f"process {number}"]):
                    store.set(store.get(f"process {number}").decode(), token)
                    unread.discard(number)
            return all_here(0.0)

    else:
        store.set(f"process {store.add('processes', 1)}", token)
        yield until(store, token)
        run = dist.PrefixStore(store.get(token).decode(), store)
    all_here = until_all_come(run, size)
    yield partial(poll, is_over, longest=0.1) if rank == 0 else all_here
    return run


class StoreStatusBoard:
    """Notices as entries of a store of torch.distributed."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._notices: dict[int, Status] = {}
        self._writers: dict[int, tuple[str, int, float]] = {}  # where, which process, and when
        self._number = 0  # of this rank among those with notices; 0 for none
        self._count = 0  # as it was at the last look
        self._ended = False  # the process that keeps the store

    def publish(self, notice: Status, /) -> None:
        writer = pid_space(), os.getpid(), seconds_since_boot()
        text = json.dumps((self._rank, writer, notice))
        self._ask(lambda: self._publish(text), must=True)

    def read(self) -> dict[int, Status]:
        self._ask(self._read)
        return dict(self._notices)

    def clear(self, size: int, store: dist.Store) -> None:
        """The last of `size` ranks that calls this leaves no key in the `store` around its own."""
        self._ask(lambda: self._clear(size, store), must=True)

    def close(self) -> None:
        _messenger().finish()

    def _ask(self, task: Callable[[], object], *, must: bool = False) -> None:
        def unless_ended() -> None:
            if not self._ended:
                try:
                    task()
                except RuntimeError:  # torch would print a trace for each further request
                    self._ended = True

        _messenger().ask(unless_ended, must=must)

    def _publish(self, text: str) -> None:
        if not self._number:
            self._number = self._store.add(_COUNTER, 1) % _WRITTEN
        self._store.set(_key(self._number), text)
        self._store.add(_COUNTER, _WRITTEN)

    def _clear(self, size: int, store: dist.Store) -> None:
        if self._store.add("let go", 1) == size:
            for key in getattr(store, "list_keys", list)():  # of newer torch
                store.delete_key(key)

    def _read(self) -> None:
        count = self._store.add(_COUNTER, 0)
        if count == self._count:
            return
        keys = [_key(number) for number in range(1, count % _WRITTEN + 1) if number != self._number]
        if keys and not self._store.check(keys):  # one is being written
            keys = [key for key in keys if self._store.check([key])]
        else:
            self._count = count
        for text in self._store.multi_get(keys) if keys else ():
            rank, writer, notice = json.loads(text)
            self._notices[rank], self._writers[rank] = Status(*notice), writer


class Meetings(StoreStatusBoard):
    """The notices of all ranks before those of a group have met; some may be of an earlier run."""

    def read(self) -> dict[int, Status]:
        """Those that are of this run, as far as is known; a failure must be known to be."""
        return {
            rank: notice
            for rank, notice in super().read().items()
            if (notice.state != "failed" or self._is_here(rank)) and not self._is_past(rank)
        }

    def find_ended(self) -> Collection[int]:
        """The ranks whose processes have ended, of those that have come, on this machine."""
        super().read()
        return {r for r in self._writers if self._has_ended(r) and not self._is_past(r)}

    def _is_here(self, rank: int) -> bool:
        return self._writers[rank][0] == pid_space()

    def _has_ended(self, rank: int) -> bool:
        return self._is_here(rank) and not process_state(self._writers[rank][1])

    def _is_past(self, rank: int) -> bool:
        # Ranks start when those of an earlier run have ended.
        return self._has_ended(rank) and self._writers[rank][2] < process_start()


def _key(number: int) -> str:
    return f"notice {number}"


class _StoreThread:
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
            is_silent = self._unanswered > 0
            if is_silent and not must:
                return
            self._unanswered += 1
            self._tasks.put(task)
            seconds = _SURE_ANSWER if must and not is_silent else _ANSWER
            self._changed.wait_for(lambda: not self._unanswered, seconds)

    def finish(self) -> None:
        """Wait for all answers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered, _LAST_ANSWER)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            task()
            del task
            with self._changed:
                self._unanswered -= 1
                self._changed.notify_all()


@cache
def _messenger() -> _StoreThread:
    return _StoreThread()


# A fork has no thread of its parent's, and may make a group of its own.
after_fork(_messenger.cache_clear)
