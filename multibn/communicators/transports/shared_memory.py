"""Lines through memory that the ranks of one machine share; to other machines, by another line.

The ranks of a group meet in a store. Each offers memory, and each takes the first that it can
really open: names of machines repeat, and containers may be shut off from each other. The ranks
that have taken the same memory are a machine. How they sum there stands in shared_lines.py.

The memory is a memfd: without a name in a file system, and gone with the last process that has it.
"""

import json
import mmap
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from multibn._environment import process_state, this_machine
from multibn.communicators.lines import HostArray, Line
from multibn.communicators.transports.shared_lines import (
    GATE,
    NUMBER,
    InPieces,
    LineOverMachines,
    Neighbours,
    SharedLine,
    core,
)
from multibn.communicators.watch import Done, poll

# Numbers that a rank may have in all lines of a group together. Addresses are reserved for so many;
# memory that nobody has written to is not used.
_NUMBERS = 2**20
_PIECE = 4096  # numbers of a message at a time, in lines for arrays of any length
_TRIAL = 2**16  # bytes that must be had before the others are told of the memory
_ROUND = 8  # numbers in a cache line: lengths are rounded up to a multiple


class Store(Protocol):
    """Where the ranks meet; torch.distributed's."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Machines:
    """On which machine each rank of a group is, found out when the first line is opened.

    Parameters
    ----------
    store
        Used by this group, and for nothing else.
    rank, size
        Of this process among the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._meeting = self._meet()
        self._memory: mmap.mmap | None = None
        self._neighbours: Neighbours | None = None
        self._firsts: list[int] = []  # for each rank, the first rank of its machine
        self._numbers = 0  # of a rank in all lines
        self._used = 0  # bytes of the memory

    def open_line(
        self, number: int, buffer: HostArray | None, between: Callable[[Sequence[int]], Line]
    ) -> Line:
        """As `Transport.open_line`; `between` opens a line of another kind between some ranks."""
        return _Line(self._meeting, partial(self._choose, number, buffer, between))

    def close(self, *, goodbye: bool) -> None:
        """Let go of the memory; `goodbye` tells those who wait that this rank will not come."""
        if goodbye and self._neighbours is not None:
            self._neighbours.leave()
        self._memory = self._neighbours = None

    def _meet(self) -> Generator[bool, None, None]:
        """Ends when all ranks have met."""
        with ExitStack() as stack:
            offer: dict[str, Any] = {"pid": os.getpid(), "pid_space": _pid_space()}
            shares = why_not() is None
            if shares:
                with suppress(OSError):
                    size = (2 * NUMBER * _NUMBERS + GATE) * self._size
                    memory, self._memory = stack.enter_context(_offered(size))
                    offer |= memory
            offers = yield from self._gather("offer", offer)
            first = self._rank
            for rank in range(self._rank if shares else 0):
                opened = _opened(offers[rank])
                if opened is not None:
                    first, self._memory = rank, opened
                    break
            firsts = yield from self._gather("first rank", first, partial(_check_alive, offers))
        # A later group may use the store. The last rank to come here leaves nothing there.
        if self._store.add("ranks that have read", 1) == self._size:
            for key in (*self._keys("offer"), *self._keys("first rank"), "ranks that have read"):
                self._store.delete_key(key)
        # The memory of a rank that has itself taken another's is nobody's.
        self._firsts = [f if firsts[f] == f else rank for rank, f in enumerate(firsts)]
        first = self._firsts[self._rank]
        here = {r: offers[r]["pid"] for r in range(self._size) if self._firsts[r] == first}
        if len(here) > 1:
            assert self._memory is not None
            gates = np.ndarray((len(here), GATE), np.uint8, self._memory)
            self._neighbours = Neighbours(self._rank, here, gates)
            self._used = gates.size

    def _gather(
        self, what: str, mine: Any, check: Callable[[], None] = lambda: None
    ) -> Generator[bool, None, list[Any]]:
        """`mine` of every rank; `check` raises where a rank will not come."""
        keys = self._keys(what)
        self._store.set(keys[self._rank], json.dumps(mine))
        while not self._store.check(keys):
            check()
            yield False
        return [json.loads(self._store.get(key)) for key in keys]

    def _keys(self, what: str) -> list[str]:
        return [f"{what} of {rank}" for rank in range(self._size)]

    def _choose(
        self, number: int, buffer: HostArray | None, between: Callable[[Sequence[int]], Line]
    ) -> Line:
        """The kind of line that fits; the same on all ranks."""
        length = -(-(_PIECE if buffer is None else buffer.size) // _ROUND) * _ROUND
        self._numbers += length + 2 * GATE // NUMBER
        firsts = sorted(set(self._firsts))
        if len(firsts) == self._size or self._numbers > _NUMBERS:
            return between(range(self._size))
        across = between(firsts) if self._rank in firsts and len(firsts) > 1 else None
        line: Line
        if self._neighbours is None:
            assert across is not None
            line = across
        else:
            assert self._memory is not None
            start, num_here = self._used, len(self._neighbours.ranks)
            self._used += 2 * GATE + 2 * num_here * length * NUMBER
            gates = np.ndarray(2 * GATE, np.uint8, self._memory, start)
            slots = np.ndarray((2, num_here, length), np.float64, self._memory, start + gates.size)
            parts = (number, self._neighbours, gates, slots, buffer)
            line = SharedLine(*parts) if len(firsts) == 1 else LineOverMachines(*parts, across)
        return line if buffer is not None else InPieces(line, length * NUMBER, self._size)


class _Line:
    """A line whose kind is known when all ranks have met."""

    begin: Callable[[HostArray], Done]

    def __init__(self, meeting: Iterator[bool], choose: Callable[[], Line]) -> None:
        self._meeting, self._choose = meeting, choose
        self._chosen: Line | None = None

    def opened(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        if self._chosen is None:
            if not poll(lambda: next(self._meeting, True), seconds):
                return False
            self._chosen = self._choose()
            self.begin = self._chosen.begin
        return self._chosen.opened(max(end - time.monotonic(), 0.0))


def _check_alive(offers: Sequence[dict[str, Any]]) -> None:
    """Raise if one of the processes that have made offers has ended, as far as can be seen."""
    for rank, offer in enumerate(offers):
        if offer["pid_space"] == _pid_space() and not process_state(offer["pid"]):
            raise RuntimeError(f"the process of rank {rank} has ended")


@cache
def _pid_space() -> str:
    """Equal for processes that know each other by their pids."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


@contextmanager
def _offered(nbytes: int) -> Iterator[tuple[dict[str, Any], mmap.mmap]]:
    """Memory, and by what another process of this user opens it until the block is left."""
    # Nobody can guess the name, so that a process of the same number, in another container or on
    # another machine, is not taken for this one.
    name = f"multibn-{secrets.token_hex(16)}"
    fd = os.memfd_create(name)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, _TRIAL)
        yield {"pid": os.getpid(), "fd": fd, "name": name}, mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _opened(offer: dict[str, Any]) -> mmap.mmap | None:
    """The memory that another process offers; None if this process cannot open it."""
    if "fd" not in offer:
        return None
    path = f"/proc/{offer['pid']}/fd/{offer['fd']}"
    try:
        if os.readlink(path) != f"/memfd:{offer['name']} (deleted)":
            return None
        fd = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)
    except OSError:
        return None


def why_not() -> str | None:
    """Why this process shares no memory with others, and what to do; None if it does."""
    switch = os.environ.get("MULTIBN_SHARED_MEMORY", "1")
    if switch not in ("0", "1"):
        raise ValueError(f"MULTIBN_SHARED_MEMORY must be 0 or 1: got {switch!r}.")
    if switch == "0":
        return "MULTIBN_SHARED_MEMORY is 0"
    if not hasattr(os, "memfd_create"):
        return "needs Linux"
    if core is None:
        return "multibn was built without a C compiler: install one, and multibn again"
    try:
        with _offered(_TRIAL) as (offer, _):
            if _opened(offer) is None:
                return f"needs /proc: cannot open /proc/{offer['pid']}/fd/{offer['fd']}"
    except OSError as error:
        return f"the system gives no memory to share: {error}"
    return None
