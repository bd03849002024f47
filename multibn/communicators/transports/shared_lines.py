"""Lines through memory that ranks share; shared_memory.py finds out which ranks share some.

Each rank writes its numbers into a slot of its own, and adds all slots in the order of the ranks,
so that the sum has the same bits on all of them. Of a group on several machines, the first rank of
each machine adds, sums over the machines by another line, and hands the result to the others.
"""

import os
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import numpy as np

from multibn import message
from multibn._environment import process_state
from multibn.communicators.lines import HostArray, Line, Opening, seconds_of_offers
from multibn.communicators.notices import RankLostError
from multibn.communicators.watch import Done, in_turn, never

try:
    import multibn.communicators.transports._shared_memory as core
except ImportError:  # built without a C compiler
    core = None  # type: ignore[assignment]

NUMBER = 8  # bytes of a float64
SMALL = 2**16  # bytes: each rank reads what all ranks write, and an engine hands larger arrays on
GATE = 256  # bytes, see _shared_memory.c
_HEAD = 8  # numbers before those of an array of any kind: a cache line
_LOOK = 0.02  # seconds between two looks at whether the other processes live


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
        return self._small.begin(a) if a.nbytes <= SMALL else in_turn(self._by_engine(a))

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
        self._summed = self._all_here + GATE
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
