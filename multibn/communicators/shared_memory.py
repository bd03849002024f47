"""Lines through memory that the ranks of one machine share; to other machines, by another line.

The ranks of a group meet in a store. Each offers memory, and each takes the first that it can
really open: names of machines repeat, and containers may be shut off from each other. The ranks
that have taken the same memory are a machine. Each rank writes its numbers into a slot of its own,
and adds all slots in the order of the ranks, so that the sum has the same bits on all of them. Of a
group on several machines, the first rank of each machine adds, sums over the machines by another
line, and hands the result to the others.

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

from multibn import message
from multibn._environment import process_state, this_machine
from multibn.communicators._lines import HostArray, Line
from multibn.communicators._watch import Done, RankLeftError, poll

try:
    import multibn.communicators._shared_memory as _core
except ImportError:  # built without a C compiler
    _core = None  # type: ignore[assignment]

# Numbers that a rank may have in all lines of a group together. Addresses are reserved for so many;
# memory that nobody has written to is not used.
_NUMBERS = 2**20
_PIECE = 4096  # numbers of a message at a time, in lines for arrays of any length
_TRIAL = 2**16  # bytes that must be had before the others are told of the memory
_NUMBER = 8  # bytes of a float64
_ROUND = 8  # numbers in a cache line: lengths are rounded up to a multiple
_GATE = 256  # bytes, see _shared_memory.c
_LOOK = 0.02  # seconds between two looks at whether the other processes live


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
        self._neighbours: _Neighbours | None = None
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
                    size = (2 * _NUMBER * _NUMBERS + _GATE) * self._size
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
            gates = np.ndarray((len(here), _GATE), np.uint8, self._memory)
            self._neighbours = _Neighbours(self._rank, here, gates)
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
        self._numbers += length + 2 * _GATE // _NUMBER
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
            self._used += 2 * _GATE + 2 * num_here * length * _NUMBER
            gates = np.ndarray(2 * _GATE, np.uint8, self._memory, start)
            slots = np.ndarray((2, num_here, length), np.float64, self._memory, start + gates.size)
            parts = (number, self._neighbours, gates, slots, buffer)
            line = _SharedLine(*parts) if len(firsts) == 1 else _LineOverMachines(*parts, across)
        return line if buffer is not None else _InPieces(line, length * _NUMBER, self._size)


class _Neighbours:
    """The ranks that share memory with this one.

    Parameters
    ----------
    rank
        Of this process.
    pids
        The processes of all of them, by their ranks, in the order of the ranks.
    gates
        Memory of a gate for each, which is open when the rank has left.
    """

    def __init__(self, rank: int, pids: dict[int, int], gates: HostArray) -> None:
        self.ranks, self._pids = list(pids), list(pids.values())
        self.place = self.ranks.index(rank)
        self._memory = gates
        self._gates = [gate.ctypes.data for gate in gates]

    def leave(self) -> None:
        """Tell the others that this rank sends no more messages."""
        gate = self._gates[self.place]
        _core.arrive(gate, 1, gate, gate, 0)

    def find_missing(self) -> RuntimeError | None:
        """The error to raise if a rank has left, or its process has ended."""
        for rank, pid, gate in zip(self.ranks, self._pids, self._gates, strict=True):
            if _core.wait(gate, 1, 0.0, 0.0):
                return RankLeftError(rank)
            if not process_state(pid):
                return RuntimeError(f"the process of rank {rank} has ended")
        return None


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


class _InPieces:
    """A line for arrays of any length: the messages of a line with slots of `nbytes`.

    The first message tells whether the `size` ranks send arrays of one dtype and shape. Memory does
    not tell: numbers of one rank would be added to whatever stands beside those of another.
    """

    def __init__(self, line: Line, nbytes: int, size: int) -> None:
        self._line, self._nbytes, self._size, self.opened = line, nbytes, size, line.opened

    def begin(self, a: HostArray) -> Done:
        flat, n = a.reshape(-1), self._nbytes // a.itemsize
        fingerprint = message.fingerprint(f"{a.dtype} {a.shape}")
        kind = np.array([fingerprint, fingerprint**2])
        pieces = iter([flat[start : start + n] for start in range(0, flat.size, n)])
        current = self._line.begin(kind)
        are_alike = True

        def done(seconds: float) -> bool:
            nonlocal current, are_alike
            end = time.monotonic() + seconds
            while are_alike and current(max(end - time.monotonic(), 0.0)):
                are_alike = message.all_equal(kind[0], kind[1], self._size)
                if are_alike:
                    piece = next(pieces, None)
                    if piece is None:
                        return True
                    current = self._line.begin(piece)
            if not are_alike:  # the notices will say where the other ranks are
                time.sleep(max(end - time.monotonic(), 0.0))
            return False

        return done


class _SharedLine:
    """A line between ranks that share memory.

    Parameters
    ----------
    number
        Of the line.
    gates
        Memory of two gates, which count the ranks that have come to a message.
    slots
        Memory of shape (2, ranks, length), for messages with even and with odd numbers. When a rank
        begins a message, all ranks have read the message before the last.
    """

    def __init__(
        self,
        number: int,
        neighbours: _Neighbours,
        gates: HostArray,
        slots: HostArray,
        buffer: HostArray | None,
    ) -> None:
        self._slots, self._neighbours, self._place = slots, neighbours, neighbours.place
        self._buffer, self._memory = buffer, gates
        self._all_here = gates.ctypes.data
        self._summed = self._all_here + _GATE
        self._slots_at = [slots[parity].ctypes.data for parity in (0, 1)]
        _, self._num_here, length = slots.shape
        self._stride = length * _NUMBER
        self._buffer_at = 0 if buffer is None else buffer.ctypes.data
        self._yielding = _yielding(self._num_here)
        self._begun = 0  # messages
        self._waited = 0.0  # seconds, in this message
        self._message: HostArray = np.empty(0)
        self._message_at = 0
        # The first message, on this machine alone, tells whether all open the line of this number.
        self._numbers = np.array([number + 2.0, (number + 2.0) ** 2])
        self._has_met = False

    def opened(self, seconds: float) -> bool:
        if self._begun == 0:
            self.begin(self._numbers)
        if not self._has_met:
            self._has_met = self._add_all(seconds)
            if not self._has_met:
                return False
        total, squares = self._numbers
        if message.all_equal(total, squares, self._num_here):
            return True
        time.sleep(seconds)  # the notices will say where the other ranks are
        return False

    def begin(self, a: HostArray) -> Done:
        self._begun += 1
        self._waited = 0.0
        self._message = a
        self._message_at = self._buffer_at if a is self._buffer else a.ctypes.data
        slot = self._slots_at[self._begun & 1] + self._place * self._stride
        _core.arrive(self._all_here, self._begun * self._num_here, slot, self._message_at, a.nbytes)
        return self._done

    def _add_all(self, seconds: float) -> bool:
        """Make of the message the sum over this machine; False if a rank has not come by then."""
        if not self._open(self._all_here, self._begun * self._num_here, seconds):
            return False
        self._add(self._num_here)
        return True

    _done = _add_all

    def _add(self, num_slots: int) -> None:
        """Make of the message the sum of the first slots."""
        a, parity = self._message, self._begun & 1
        if a.dtype == np.float64:
            _core.add(self._message_at, self._slots_at[parity], self._stride, num_slots, a.size)
        else:
            rows = self._slots[parity, :num_slots].view(a.dtype)[:, : a.size]
            np.add.reduce(rows, axis=0, dtype=a.dtype, out=a.reshape(-1))

    def _open(self, gate: int, goal: int, seconds: float) -> bool:
        """Whether so many have come to a gate within that time; raises if a process has ended."""
        while not _core.wait(gate, goal, min(seconds, _LOOK), self._yielding - self._waited):
            self._waited += _LOOK
            seconds -= _LOOK
            missing = self._neighbours.find_missing()
            if missing is not None:
                if _core.wait(gate, goal, 0.0, 0.0):  # it had come before
                    return True
                raise missing
            if seconds <= 0:
                return False
        return True


class _LineOverMachines(_SharedLine):
    """A line between ranks that share memory with some of the group.

    Parameters
    ----------
    across
        On the first rank of the machine: the line between the first ranks.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:-1])
        self._across: Line | None = arguments[-1]
        self._across_opened = False
        self._pending: Done | None = None

    def opened(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        if self._across is not None and not self._across_opened:
            self._across_opened = self._across.opened(seconds)
            if not self._across_opened:
                return False
        return super().opened(max(end - time.monotonic(), 0.0))

    def _done(self, seconds: float) -> bool:
        if self._across is None:
            if not self._open(self._summed, self._begun - 1, seconds):
                return False
            self._add(1)
            return True
        end = time.monotonic() + seconds
        if self._pending is None:
            if not self._add_all(seconds):
                return False
            self._pending = self._across.begin(self._message)
        if not self._pending(max(end - time.monotonic(), 0.0)):
            return False
        self._pending = None
        a, slot = self._message, self._slots_at[self._begun & 1]
        _core.arrive(self._summed, self._begun - 1, slot, self._message_at, a.nbytes)
        return True


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


def _yielding(num_here: int) -> float:
    """Seconds in which a waiting rank only offers its core, and wakes without delay.

    Few where ranks outnumber the cores: the kernel would spend its time on their offers.
    """
    ranks = max(num_here, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 2e-4 if ranks > len(os.sched_getaffinity(0)) else 0.1


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
    if _core is None:
        return "multibn was built without a C compiler: install one, and multibn again"
    try:
        with _offered(_TRIAL) as (offer, _):
            if _opened(offer) is None:
                return f"needs /proc: cannot open /proc/{offer['pid']}/fd/{offer['fd']}"
    except OSError as error:
        return f"the system gives no memory to share: {error}"
    return None
