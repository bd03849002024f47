"""Lines through memory that ranks share; shared_memory.py finds out which ranks share some.

Each rank writes its numbers into a slot of its own, and adds all slots in the order of the ranks,
so that the sum has the same bits on all of them. Of a group on several machines, the first rank of
each machine adds, sums over the machines by another line, and hands the result to the others.
"""

import os
import time
from typing import Any

import numpy as np

from multibn import message
from multibn._environment import process_state
from multibn.communicators.lines import HostArray, Line
from multibn.communicators.watch import Done, RankLeftError

try:
    import multibn.communicators.transports._shared_memory as core
except ImportError:  # built without a C compiler
    core = None  # type: ignore[assignment]

NUMBER = 8  # bytes of a float64
GATE = 256  # bytes, see _shared_memory.c
_LOOK = 0.02  # seconds between two looks at whether the other processes live


class Neighbours:
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
        core.arrive(gate, 1, gate, gate, 0)

    def find_missing(self) -> RuntimeError | None:
        """The error to raise if a rank has left, or its process has ended."""
        for rank, pid, gate in zip(self.ranks, self._pids, self._gates, strict=True):
            if core.wait(gate, 1, 0.0, 0.0):
                return RankLeftError(rank)
            if not process_state(pid):
                return RuntimeError(f"the process of rank {rank} has ended")
        return None


class InPieces:
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


class SharedLine:
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
        neighbours: Neighbours,
        gates: HostArray,
        slots: HostArray,
        buffer: HostArray | None,
    ) -> None:
        self._slots, self._neighbours, self._place = slots, neighbours, neighbours.place
        self._buffer, self._memory = buffer, gates
        self._all_here = gates.ctypes.data
        self._summed = self._all_here + GATE
        self._slots_at = [slots[parity].ctypes.data for parity in (0, 1)]
        _, self._num_here, length = slots.shape
        self._stride = length * NUMBER
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
        core.arrive(self._all_here, self._begun * self._num_here, slot, self._message_at, a.nbytes)
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
        core.arrive(self._summed, self._begun - 1, slot, self._message_at, a.nbytes)
        return True


def _yielding(num_here: int) -> float:
    """Seconds in which a waiting rank only offers its core, and wakes without delay.

    Few where ranks outnumber the cores: the kernel would spend its time on their offers.
    """
    ranks = max(num_here, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 2e-4 if ranks > len(os.sched_getaffinity(0)) else 0.1
