"""Memory that the ranks of one machine share, and the lines that a group opens in it.

The ranks of a group meet in a store. Each offers memory, and each takes the first that it can
really open: names of machines repeat, and containers may be shut off from each other. The ranks
that have taken the same memory are a machine. The memory is a memfd: without a name in a file
system, and gone with the last process that has it.

Each rank writes its numbers into a slot of its own, and adds all slots in the order of the ranks,
so that the sum has the same bits on all of them. Of a group on several machines, the first rank of
each machine adds, sums over the machines by another line, and hands the result to the others.
"""

import json
import mmap
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from multibn import message
from multibn._environment import pid_space, process_state
from multibn.communicators.lines import HostArray, Line, Opening, seconds_of_offers
from multibn.communicators.notices import RankLostError
from multibn.communicators.watch import Done, in_turn, never

try:
    import multibn.communicators.transports._shared_memory as core
except ImportError:  # built without a C compiler
    core = None  # type: ignore[assignment]

_NUMBER = 8  # bytes of a float64
_SMALL = 2**16  # bytes: each rank reads what all ranks write, and an engine hands larger arrays on
_GATE = 256  # bytes, see _shared_memory.c
_HEAD = 8  # numbers before those of an array of any kind: a cache line
_LOOK = 0.02  # seconds between two looks at whether the other processes live
# Numbers that a rank may have in all lines of a group together. Addresses are reserved for so many;
# memory that nobody has written to is not used.
_NUMBERS = 2**20
_TRIAL = 2**16  # bytes that must be had before the others are told of the memory
_ROUND = 8  # numbers in a cache line: lengths are rounded up to a multiple


# Opens a line of another kind between some ranks.
Between: TypeAlias = Callable[[Sequence[int]], Generator[None, None, Line]]


class Machines:
    """On which machine each rank of a group is, found out when the first line is opened.

    They meet in a store of torch.distributed's, which is used by this group alone.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._memory: mmap.mmap | None = None
        self._neighbours: Neighbours | None = None
        self._firsts: list[int] = []  # for each rank, the first rank of its machine
        self._numbers = 0  # of a rank in all lines
        self._used = 0  # bytes of the memory

    def open_line(
        self, number: int, buffer: HostArray | None, between: Between
    ) -> Generator[None, None, Line]:
        """As `Transport.open_line`; `between` opens a line of another kind between some ranks."""
        if not self._firsts:
            yield from self._meet()
        firsts, everybody = sorted(set(self._firsts)), range(self._size)
        length = -(-(_SMALL // _NUMBER if buffer is None else buffer.size) // _ROUND) * _ROUND
        length += _ROUND * (buffer is None)
        self._numbers += length + 2 * _GATE // _NUMBER
        if len(firsts) == self._size or self._numbers > _NUMBERS:
            return (yield from between(everybody))
        across: Line | None = None
        if self._rank in firsts and len(firsts) > 1:
            across = yield from between(firsts)
        line = across
        if self._neighbours is not None:
            assert self._memory is not None
            start, num_here = self._used, len(self._neighbours.ranks)
            self._used += 2 * _GATE + 2 * num_here * length * _NUMBER
            gates = np.ndarray(2 * _GATE, np.uint8, self._memory, start)
            slots = np.ndarray((2, num_here, length), np.float64, self._memory, start + gates.size)
            parts = (number, self._neighbours, gates, slots, buffer)
            shared = LineOverMachines(*parts, across) if len(firsts) > 1 else SharedLine(*parts)
            yield from shared.meet()
            line = shared
        assert line is not None
        return line if buffer is not None else SmallOrLarge(line, lambda: between(everybody))

    def close(self, *, goodbye: bool) -> None:
        """Let go of the memory; `goodbye` tells those who wait that this rank will not come."""
        if goodbye and self._neighbours is not None:
            self._neighbours.leave()
        self._memory = self._neighbours = None

    def _meet(self) -> Generator[None, None, None]:
        """Ends when all ranks have met."""
        with ExitStack() as stack:
            offer: dict[str, Any] = {"pid": os.getpid(), "pid_space": pid_space()}
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
            self._neighbours = Neighbours(self._rank, here, gates)
            self._used = gates.size

    def _gather(
        self, what: str, mine: Any, check: Callable[[], None] = lambda: None
    ) -> Generator[None, None, list[Any]]:
        """`mine` of every rank; `check` raises where a rank will not come."""
        *keys, number, complete = self._keys(what)
        self._store.set(keys[self._rank], json.dumps(mine))
        # While ranks are late, one key says so, and not as many as there are ranks.
        if self._store.add(number, 1) == self._size:
            self._store.set(complete, "")
        while not self._store.check([complete]):
            check()
            yield
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def _keys(self, what: str) -> list[str]:
        """Of each rank, of the number of ranks that have come, and one for when all have."""
        of_ranks = [f"{what} of {rank}" for rank in range(self._size)]
        return [*of_ranks, f"number of {what}", f"all of {what}"]


def _check_alive(offers: Sequence[dict[str, Any]]) -> None:
    """Raise if one of the processes that have made offers has ended, as far as can be seen."""
    for rank, offer in enumerate(offers):
        if offer["pid_space"] == pid_space() and not process_state(offer["pid"]):
            raise RankLostError(rank)


@contextmanager
def _offered(nbytes: int) -> Iterator[tuple[dict[str, Any], mmap.mmap]]:
    """Memory, and by what another process of this user opens it until the block is left."""
    # Nobody can guess the name, so that a process of the same number, in another container or on
    # another machine, is not taken for this one.
    import fcntl  # Linux has it, as what follows

    name = f"multibn-{secrets.token_hex(16)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        # A process that made the memory shorter would end those that read beyond its end.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.posix_fallocate(fd, 0, _TRIAL)
        offer = {"pid": os.getpid(), "fd": fd, "name": name, "nbytes": nbytes}
        yield offer, mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _opened(offer: dict[str, Any]) -> mmap.mmap | None:
    """The memory that another process offers; None if this process cannot open it."""
    if "fd" not in offer:
        return None
    # Numbers: whoever can write to the store is not to choose the path.
    path = f"/proc/{int(offer['pid'])}/fd/{int(offer['fd'])}"
    try:
        if os.readlink(path) != f"/memfd:{offer['name']} (deleted)":
            return None
        fd = os.open(path, os.O_RDWR)
        try:
            if os.fstat(fd).st_size != offer["nbytes"]:
                return None
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


class Neighbours:
    """The ranks that share memory with `rank`, this one.

    `pids` are all their processes by their ranks, in order; `gates` is memory of a gate for each,
    which is open when the rank has left.
    """

    def __init__(self, rank: int, pids: dict[int, int], gates: HostArray) -> None:
        self.ranks, self._pids = list(pids), list(pids.values())
        self.place = self.ranks.index(rank)
        self._memory = gates
        self._gates = [gate.ctypes.data for gate in gates]

    def leave(self) -> None:
        """Tell the others that this rank sends no more messages."""
        gate = self._gates[self.place]
        core.arrive(gate, 1, gate, gate, 0)

    def find_missing(self) -> RuntimeError | None:
        """The error to raise if a rank has left, or its process has ended."""
        for rank, pid, gate in zip(self.ranks, self._pids, self._gates, strict=True):
            if core.wait(gate, 1, 0.0, 0.0):
                return RankLostError(rank, has_left=True)
            if not process_state(pid):
                return RankLostError(rank)
        return None


class SmallOrLarge:
    """A line for arrays of any length: small ones in memory, others as an engine sums them.

    The engine's line is opened when the first large array comes.
    """

    def __init__(self, small: Line, open_large: Callable[[], Generator[None, None, Line]]) -> None:
        self._small, self._open_large = small, open_large
        self._large: Opening | None = None

    def begin(self, a: HostArray) -> Done:
        return self._small.begin(a) if a.nbytes <= _SMALL else in_turn(self._by_engine(a))

    def _by_engine(self, a: HostArray) -> Iterator[Done]:
        self._large = self._large or Opening(self._open_large())
        yield self._large.done
        assert self._large.line is not None
        yield self._large.line.begin(a)


class SharedLine:
    """A line between ranks that share memory: two gates, and slots of shape (2, ranks, length).

    The gates count the ranks that have come to a message. Messages with even and with odd numbers
    have slots of their own: when a rank begins a message, all ranks have read the message before
    the last. A line that has no `buffer`, from which all messages are sent, carries arrays of any
    dtype and shape. Their slots begin with a fingerprint of both, for numbers of one rank would be
    added to whatever stands beside those of another.
    """

    def __init__(
        self,
        number: int,
        neighbours: Neighbours,
        gates: HostArray,
        slots: HostArray,
        buffer: HostArray | None,
    ) -> None:
        self._kinds = None if buffer is not None else slots[:, :, 0]
        slots = slots if buffer is not None else slots[:, :, _HEAD:]
        self._slots, self._neighbours, self._place = slots, neighbours, neighbours.place
        self._buffer, self._memory = buffer, gates
        self._all_here = gates.ctypes.data
        self._summed = self._all_here + _GATE
        self._slots_at = [slots[parity].ctypes.data for parity in (0, 1)]
        self._num_here, self._stride = slots.shape[1], slots.strides[1]
        self._buffer_at = 0 if buffer is None else buffer.ctypes.data
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._yielding = seconds_of_offers(max(self._num_here, local))
        self._begun = 0  # messages
        self._waited = 0.0  # seconds, in this message
        self._message: HostArray = np.empty(0)
        self._message_at = 0
        self._number = number

    def meet(self) -> Generator[None, None, None]:
        """Ends when all ranks of this machine have opened the line of this number.

        The ranks of other lines have failed to meet, and notices will say where they are.
        """
        numbers = np.array([self._number + 2.0, (self._number + 2.0) ** 2])
        self.begin(numbers)
        while not self._add_all(0.0):
            yield
        while not message.all_equal(numbers[0], numbers[1], self._num_here):
            yield

    def begin(self, a: HostArray) -> Done:
        self._begun += 1
        self._waited = 0.0
        self._message = a
        self._message_at = self._buffer_at if a is self._buffer else a.ctypes.data
        parity = self._begun & 1
        if self._kinds is not None:
            self._kinds[parity, self._place] = message.fingerprint(f"{a.dtype} {a.shape}")
        slot = self._slots_at[parity] + self._place * self._stride
        core.arrive(self._all_here, self._begun * self._num_here, slot, self._message_at, a.nbytes)
        return self._add_all

    def _add_all(self, seconds: float) -> bool:
        """Make of the message the sum over this machine; False if a rank has not come by then."""
        if not self._open(self._all_here, self._begun * self._num_here, seconds):
            return False
        if self._kinds is not None:
            kinds = self._kinds[self._begun & 1]
            if (kinds != kinds[0]).any():
                return never(seconds)
        self._add(self._num_here)
        return True

    def _add(self, num_slots: int) -> None:
        """Make of the message the sum of the first slots."""
        a, parity = self._message, self._begun & 1
        if a.dtype == np.float64:
            core.add(self._message_at, self._slots_at[parity], self._stride, num_slots, a.size)
        else:
            rows = self._slots[parity, :num_slots].view(a.dtype)[:, : a.size]
            np.add.reduce(rows, axis=0, dtype=a.dtype, out=a.reshape(-1))

    def _open(self, gate: int, goal: int, seconds: float) -> bool:
        """Whether so many have come to a gate within that time; raises if a process has ended."""
        while not core.wait(gate, goal, min(seconds, _LOOK), self._yielding - self._waited):
            self._waited += _LOOK
            seconds -= _LOOK
            missing = self._neighbours.find_missing()
            if missing is not None:
                if core.wait(gate, goal, 0.0, 0.0):  # it had come before
                    return True
                raise missing
            if seconds <= 0:
                return False
        return True


class LineOverMachines(SharedLine):
    """A line between ranks that share memory with some of the group.

    The last argument is the line between the first ranks of all machines, None on other ranks.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:-1])
        self._across: Line | None = arguments[-1]

    def begin(self, a: HostArray) -> Done:
        super().begin(a)
        return in_turn(self._steps(a))

    def _steps(self, a: HostArray) -> Iterator[Done]:
        number = self._begun - 1
        if self._across is None:
            yield partial(self._open, self._summed, number)
            self._add(1)
        else:
            yield self._add_all
            yield self._across.begin(a)
            slot = self._slots_at[self._begun & 1]
            core.arrive(self._summed, number, slot, self._message_at, a.nbytes)
