"""Memory that the ranks of one machine share, and a group's messages in it.

The ranks of a group meet in a store. The first offers memory, and the others try to open it: names
of machines repeat, and containers may be shut off from each other. If all ranks have the memory,
they are on one machine. The memory is a memfd: without a name in a file system, and gone with the
last process that has it.

Each rank writes its numbers into a slot of its own, and adds all slots in the order of the ranks,
so that the sum has the same bits on all of them.
"""

import json
import mmap
import os
import secrets
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from multibn import wire
from multibn._platform import pid_space, process_state
from multibn.communicators.channel import HostArray, spin_seconds
from multibn.communicators.polling import Poll, never, poll
from multibn.communicators.watchdog import RankLostError

try:
    import multibn.communicators.transports._shared_memory as core
except ImportError:  # built without a C compiler
    core = None  # type: ignore[assignment]

_NUMBER = 8  # bytes of a float64
SMALL = 2**16  # bytes: each rank reads what all ranks write, and an engine is better at more
_GATE = 256  # bytes, see _shared_memory.c
_HEAD = 8  # numbers before those of an array of any kind: a cache line
_LOOK = 0.02  # seconds between two looks at whether the other processes live
# Numbers that a rank may have in all messages of a group together. Addresses are reserved for so
# many; memory that nobody has written to is not used.
_NUMBERS = 2**20
_TRIAL = 2**16  # bytes that must be had before the others are told of the memory


class SharedMemory:
    """Memory of a group whose ranks are all on one machine, as its first message finds out.

    The ranks meet in a part of torch.distributed's store, which is used by this group alone.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._memory: mmap.mmap | None = None
        self._pids: list[int] = []  # of all ranks, when they have met
        self._gates: list[int] = []  # of each rank, open when that has left
        self._used = 0  # bytes of the memory

    def open_allreduce(
        self, number: int, buffer: HostArray | None
    ) -> Generator[Poll, None, "SharedAllreduce | None"]:
        """As `Transport.open_line`; None if the ranks share no memory, or if that is full."""
        if not self._pids:
            yield from self._meet()
        length = SMALL // _NUMBER + _HEAD if buffer is None else buffer.size
        length = -(-length // _HEAD) * _HEAD
        start, nbytes = self._used, _GATE + 2 * self.size * length * _NUMBER
        if self._memory is None or start + nbytes > len(self._memory):
            return None
        self._used += nbytes
        gate = np.ndarray(_GATE, np.uint8, self._memory, start)
        slots = np.ndarray((2, self.size, length), np.float64, self._memory, start + _GATE)
        allreduce = SharedAllreduce(number, self, gate, slots, buffer)
        yield from allreduce.meet()
        return allreduce

    def close(self, *, goodbye: bool) -> None:
        """Let go of the memory; `goodbye` tells those who wait that this rank will not come."""
        if goodbye and self._memory is not None:
            gate = self._gates[self.rank]
            core.arrive(gate, 1, gate, gate, 0)
        self._memory = self._store = None

    def find_missing(self) -> RankLostError | None:
        """The error to raise if a rank has left, or its process has ended."""
        for rank, (pid, gate) in enumerate(zip(self._pids, self._gates, strict=True)):
            if core.wait(gate, 1, 0.0, 0.0):
                return RankLostError(rank, has_left=True)
            if not process_state(pid):
                return RankLostError(rank)
        return None

    def _meet(self) -> Iterator[Poll]:
        """Ends when all ranks have met."""
        shares = why_not() is None
        with ExitStack() as stack:  # until all ranks have tried to open the memory
            if self.rank == 0:
                offer: dict[str, Any] = {}
                if shares:
                    with suppress(OSError):
                        nbytes = (2 * _NUMBER * _NUMBERS + _GATE) * self.size
                        offer, self._memory = stack.enter_context(_offered(nbytes))
                self._store.set("offer", json.dumps(offer))
            else:
                yield self._until("offer")
                if shares:
                    self._memory = _opened(json.loads(self._store.get("offer")))
            keys = [f"rank {rank}" for rank in range(self.size)]
            mine = self._memory is not None, pid_space(), os.getpid()
            self._store.set(keys[self.rank], json.dumps(mine))
            # While ranks are late, one key says so, and not as many as there are ranks.
            if self._store.add("number of ranks", 1) == self.size:
                self._store.set("all ranks", "")
            yield self._until("all ranks")
        ranks = [json.loads(text) for text in self._store.multi_get(keys)]
        for rank, (_, space, pid) in enumerate(ranks):
            if space == pid_space() and not process_state(pid):
                raise RankLostError(rank)
        self._pids = [pid for _, _, pid in ranks]
        if not all(opened for opened, _, _ in ranks):
            self._memory = None
        if self._memory is not None:
            gates = np.ndarray((self.size, _GATE), np.uint8, self._memory)
            self._gates = [gate.ctypes.data for gate in gates]
            self._used = gates.size

    def _until(self, key: str) -> Poll:
        """Waits for a key of the store."""
        return partial(poll, lambda: self._store.check([key]), begun=time.monotonic(), longest=0.1)


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


class SharedAllreduce:
    """An allreduce in shared memory: a gate, and slots of shape (2, ranks, length).

    The gate counts the ranks that have come to a message. Messages with even and with odd numbers
    have slots of their own: when a rank begins a message, all ranks have read the message before
    the last. One that has no `buffer`, from which all messages are sent, carries small arrays of
    any dtype and shape. Their slots begin with a fingerprint of both, for numbers of one rank would
    be added to whatever stands beside those of another.
    """

    def __init__(
        self,
        number: int,
        machine: SharedMemory,
        gate: HostArray,
        slots: HostArray,
        buffer: HostArray | None,
    ) -> None:
        self._kinds = None if buffer is not None else slots[:, :, 0]
        slots = slots if buffer is not None else slots[:, :, _HEAD:]
        self._number, self._machine, self._slots, self._buffer = number, machine, slots, buffer
        self._gate = gate.ctypes.data
        self._slots_at = [slots[parity].ctypes.data for parity in (0, 1)]
        self._size, self._stride = machine.size, slots.strides[1]
        self._offset = machine.rank * self._stride
        self._buffer_at = 0 if buffer is None else buffer.ctypes.data
        self._yielding = spin_seconds(self._size)
        self._begun = 0  # messages
        self._waited = 0.0  # seconds, in this message
        self._message: HostArray = np.empty(0)
        self._message_at = 0

    def meet(self) -> Iterator[Poll]:
        """Ends when all ranks have opened the allreduce of this number.

        The ranks of other ones have failed to meet, and notices will say where they are.
        """
        numbers = np.array([self._number + 3.0, (self._number + 3.0) ** 2])
        pending = self.begin(numbers)
        if pending is not None:
            yield pending
        while not wire.all_equal(numbers[0], numbers[1], self._size):
            yield never

    def begin(self, a: HostArray) -> Poll | None:
        self._begun += 1
        self._waited = 0.0
        self._message = a
        self._message_at = self._buffer_at if a is self._buffer else a.ctypes.data
        parity = self._begun & 1
        if self._kinds is not None:
            kind = wire.fingerprint(f"{a.dtype} {a.shape}")
            self._kinds[parity, self._machine.rank] = kind
        slot = self._slots_at[parity] + self._offset
        goal = self._begun * self._size
        here = core.arrive(self._gate, goal, slot, self._message_at, a.nbytes)
        if not here or self._kinds is not None:
            return self._add_all
        core.add(self._message_at, self._slots_at[parity], self._stride, self._size, a.size)
        return None

    def _add_all(self, seconds: float) -> bool:
        """Make of the message the sum; False if a rank has not come within that time."""
        if not self._all_here(seconds):
            return False
        a, parity = self._message, self._begun & 1
        if self._kinds is not None and (self._kinds[parity] != self._kinds[parity, 0]).any():
            return never(seconds)
        if a.dtype == np.float64:
            core.add(self._message_at, self._slots_at[parity], self._stride, self._size, a.size)
        else:
            rows = self._slots[parity].view(a.dtype)[:, : a.size]
            np.add.reduce(rows, axis=0, dtype=a.dtype, out=a.reshape(-1))
        return True

    def _all_here(self, seconds: float) -> bool:
        """Whether all ranks come within that time; raises if a process has ended."""
        gate, goal = self._gate, self._begun * self._size
        while not core.wait(gate, goal, min(seconds, _LOOK), self._yielding - self._waited):
            self._waited += _LOOK
            seconds -= _LOOK
            missing = self._machine.find_missing()
            if missing is not None:
                if core.wait(gate, goal, 0.0, 0.0):  # it had come before
                    return True
                raise missing
            if seconds <= 0:
                return False
        return True
