"""Notices in a store of torch.distributed."""

import json
import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from multibn.communicators.polling import chain
from multibn.communicators.transports import shared_memory
from multibn.communicators.transports.store import StoreStatusBoard, part_of_store
from multibn.communicators.watchdog import Status

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
    return Status("waits", rank, f"bn{rank} (forward, float32, call 1)")


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
        board.clear(SIZE)
    boards[0].finish()
    assert not asked.list_keys()


def test_a_notice_that_is_being_written_is_read_later() -> None:
    asked = Counting()
    first, second = (StoreStatusBoard(asked, rank) for rank in range(2))  # type: ignore[arg-type]
    late = asked.add("notices", 1)  # of a third rank, which has not gone on yet
    second.publish(_notice(1))
    assert first.read() == {1: _notice(1)}
    asked.set(f"notice {late}", json.dumps((2, _notice(2))))
    assert first.read() == {1: _notice(1), 2: _notice(2)}


def test_a_group_of_one_name_has_a_part_of_the_store_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if torchrun restarted the ranks while one of them had not arrived yet."""
    store = dist.HashStore()
    known: list[str] = []
    for attempt, sizes in (("0", (2, 2, 3)), ("1", (2, 3, 3)), ("2", (2,))):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        for size in sizes:
            parts = [part_of_store(store, "a group", size) for _ in range(size)]
            assert not parts[0].check(["key"])
            parts[0].set("key", "")
            assert all(part.check(["key"]) for part in parts)
            (key,) = {key for key in store.list_keys() if key.endswith("/key")}.difference(known)
            known.append(key)
        part_of_store(store, "a group", 2)


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
    board.finish()
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
    monkeypatch.setattr(shared_memory, "unavailable_reason", lambda: "none")
    asked = Counting()
    meetings = [chain(shared_memory.create_shared_memory(asked, r, SIZE)) for r in range(SIZE - 1)]
    for done in meetings:
        assert not done(0.0)
    asked.take()
    for done in meetings:
        assert not done(0.0)
    assert asked.asked == {"check": SIZE - 1}
    assert threading.active_count() < SIZE
