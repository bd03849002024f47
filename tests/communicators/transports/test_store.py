"""Notices in a store of torch.distributed."""

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from multibn.communicators.polling import chain
from multibn.communicators.status_board import Status
from multibn.communicators.transports import shared_memory
from multibn.communicators.transports.store import Meetings, StoreStatusBoard, meet

NEEDS = "torch"

SIZE = 64


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self) -> None:
        self._store, self.asked = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)

    def take(self) -> int:
        """How many requests came since the last call."""
        total = self.asked.total()
        self.asked.clear()
        return total


def _notice(rank: int) -> Status:
    return Status("waits", rank, "place", f"bn{rank} (forward, float32, call 1)")


def test_ranks_ask_for_one_key_where_nothing_is_new() -> None:
    asked = Counting()
    boards = [StoreStatusBoard(asked, rank) for rank in range(SIZE)]  # type: ignore[arg-type]
    assert not boards[0].read()
    for board in boards:
        board._read()
    assert asked.take() == SIZE + 1
    for rank in range(1, SIZE):
        boards[rank].publish(_notice(rank))
    asked.take()
    for board in boards:
        board._read()
    assert asked.take() <= 4 * SIZE
    for board in boards:
        board._read()
    assert asked.take() == SIZE
    assert boards[0].read() == {rank: _notice(rank) for rank in range(1, SIZE)}
    boards[1].publish(_notice(2))
    assert boards[0].read()[1] == _notice(2)
    for board in boards:
        board.clear(SIZE, asked)  # type: ignore[arg-type]
    boards[0].close()
    assert not asked.list_keys()


def test_a_notice_that_is_being_written_is_read_later() -> None:
    asked = Counting()
    first, second = (StoreStatusBoard(asked, rank) for rank in range(2))  # type: ignore[arg-type]
    late = asked.add("notices", 1)  # of a third rank, which has not gone on yet
    second.publish(_notice(1))
    assert first.read() == {1: _notice(1)}
    asked.set(f"notice {late}", json.dumps((2, ("elsewhere", 1, 0.0), _notice(2))))
    assert first.read() == {1: _notice(1), 2: _notice(2)}


def _kept(steps: Any, found: dict[int, Any], rank: int) -> Iterator[Any]:
    found[rank] = yield from steps


def test_keys_of_one_run_are_of_no_other() -> None:
    """The first of the runs over one store ends with all ranks in it, or while one is late."""
    store = dist.HashStore()
    for size in (2, 3, 1, 3):
        found = dict[int, Any]()
        meetings: list[Any] = []
        for rank in range(size):
            for done in meetings:  # wait for those that are late
                assert not done(0.0)
            meetings.append(chain(_kept(meet(store, rank, size), found, rank)))
        while len(found) < size:
            for done in meetings:
                done(0.0)
        assert found[0].num_keys()
        assert not found[0].check(["a"])
        for rank in range(size):
            found[rank].set(f"rank {rank}", "here")
        for part in found.values():
            assert part.check(["all ranks", *[f"rank {r}" for r in range(size)]])
            part.set("a", "word of an earlier run")
        unfinished = chain(meet(store, 1, 2))
        assert not unfinished(0.0)


def test_an_ended_process_is_of_this_run_or_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late rank is not taken for the process that it had in an earlier run, which has ended."""
    store = dist.HashStore()
    mine, its = (Meetings(store, rank) for rank in range(2))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    its.publish(_notice(1))
    assert mine.read() == {1: _notice(1)}
    assert not mine.find_ended()
    with monkeypatch.context() as of_another:
        of_another.setattr(os, "getpid", lambda: pid)
        its.publish(_notice(1)._replace(state="failed"))
    assert mine.read()[1].state == "failed"
    assert set(mine.find_ended()) == {1}
    monkeypatch.setattr("multibn.communicators.transports.store.process_start", lambda: 1e12)
    assert not mine.read()
    assert not mine.find_ended()
    its.publish(_notice(1))  # it lives, however early it came
    assert mine.read() == {1: _notice(1)}
    monkeypatch.setattr("multibn.communicators.transports.store.pid_space", lambda: "elsewhere")
    assert mine.read() == {1: _notice(1)}  # a rank that waits may be of an earlier run
    its.publish(_notice(1)._replace(state="failed"))
    monkeypatch.undo()
    assert not mine.read()


def test_a_store_that_has_ended_is_asked_no_more() -> None:
    """Torch prints a trace for each request."""
    asked = []

    class Ended:
        def add(self, key: str, number: int) -> int:
            asked.append(key)
            raise RuntimeError("Connection reset by peer")

    board = StoreStatusBoard(Ended(), 0)  # type: ignore[arg-type]
    for _ in range(3):
        assert not board.read()
    board.publish(_notice(0))
    board.close()
    assert len(asked) == 1


def test_a_fork_has_a_messenger_of_its_own() -> None:
    """The thread of its parent's stays with the parent."""
    StoreStatusBoard(dist.HashStore(), 0).publish(_notice(0))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing"
        try:
            asked = dist.HashStore()
            StoreStatusBoard(asked, 1).publish(_notice(1))
            said = str(StoreStatusBoard(asked, 0).read()[1].text).encode()
        finally:
            os.write(writer, said)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000) == b"bn1 (forward, float32, call 1)"


def test_while_a_rank_is_late_the_others_ask_for_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "why_not", lambda: "none")
    asked = Counting()
    meetings = [chain(shared_memory.share(asked, r, SIZE)) for r in range(SIZE - 1)]
    for done in meetings:
        assert not done(0.0)
    asked.take()
    for done in meetings:
        assert not done(0.0)
    assert asked.asked == {"check": SIZE - 1}
    assert threading.active_count() < SIZE
