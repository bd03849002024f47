"""Shared memory for the messages of a group whose ranks are all on one machine.

Rank 0 creates the memory and offers it in a store; the other ranks try to open it. The ranks are on
one machine if all succeed. Host names do not show this: they repeat, and containers are isolated.
The memory is a memfd: it has no name in a file system, and goes with the last process that uses it.

Each rank writes its numbers into its own slot, and adds all slots in rank order, so that the sum
has the same bits on all ranks. A gate counts the ranks that have arrived at a message. Even and odd
messages use different slots: when a rank begins a message, all ranks have read the one before the
last.
"""

import json
import mmap
import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from multibn._platform import how_to_build_core, process_state
from multibn._typing import HostArray
from multibn.communicators.channel import Begin
from multibn.communicators.polling import Poll, barrier, spin_seconds, wait_for_key
from multibn.communicators.watchdog import RankLostError

try:
    import multibn.communicators.transports._shared_memory as core
except ImportError:
    core = None  # type: ignore[assignment]

# Float64 numbers in a slot. Every rank reads all slots, so gloo is faster for longer messages.
# Unused pages take no memory.
SLOT_NUMBERS = 2**16
# The padding keeps slots from competing for the same cache sets.
_SLOT_BYTES = np.float64().nbytes * (SLOT_NUMBERS + 8)
_GATE_BYTES = 256  # see _shared_memory.c
_CHECK_SECONDS = 0.02  # between two checks that the other processes are alive
_TRIAL_BYTES = 2**16  # allocated before the memory is offered to the other ranks


class SharedMemory:
    """Memory of a group whose ranks are all on one machine, in processes `pids`."""

    def __init__(self, memory: mmap.mmap, rank: int, pids: list[int]) -> None:
        self.rank, self._size, self._pids = rank, len(pids), pids
        gates = np.ndarray((self._size + 1, _GATE_BYTES), np.uint8, memory)
        # One gate for messages, and one per rank, which opens when that rank leaves.
        self._gate, *self._leaving = (gate.ctypes.data for gate in gates)
        self._slots: Any = np.ndarray((2, self._size, _SLOT_BYTES), np.uint8, memory, gates.size)
        self._slots_at = [slots.ctypes.data for slots in self._slots]
        self._spin = spin_seconds(self._size)
        self._begun = 0  # messages
        self._waited = 0.0  # seconds, in this message

    def prepare(self, a: HostArray) -> Begin | None:
        """Return a function that begins to sum `a` in place; None if `a` is too long for a slot.

        If the ranks pass different lengths, no rank hangs, but the sum is wrong.
        """
        if a.nbytes > _SLOT_BYTES:
            return None
        return partial(self._begin, a, a.ctypes.data, a.nbytes, a.size)

    def close(self, *, failed: bool) -> None:
        """Release the memory. Unless `failed`, notify waiting ranks that this rank leaves."""
        if not failed:
            gate = self._leaving[self.rank]
            core.arrive(gate, 1, gate, gate, 0)
        self._slots = None

    def _find_missing(self) -> RankLostError | None:
        """Return an error if a rank has left or its process has ended; otherwise None."""
        for rank, (pid, gate) in enumerate(zip(self._pids, self._leaving, strict=True)):
            if core.wait(gate, 1, 0.0, 0.0):
                return RankLostError(rank, has_left=True)
            if not process_state(pid):
                return RankLostError(rank)
        return None

    def _begin(self, a: HostArray, at: int, nbytes: int, n: int) -> Poll | None:
        self._begun += 1
        self._waited = 0.0
        slots = self._slots_at[self._begun & 1]
        goal = self._begun * self._size
        all_arrived = core.arrive(self._gate, goal, slots + self.rank * _SLOT_BYTES, at, nbytes)
        if not all_arrived or a.dtype != np.float64:
            return partial(self._add_all, a, at)
        core.add(at, slots, _SLOT_BYTES, self._size, n)
        return None

    def _add_all(self, a: HostArray, at: int, seconds: float) -> bool:
        """Wait for all ranks, then sum; False if one is late. Raise if one has left or ended."""
        gate, goal = self._gate, self._begun * self._size
        while not core.wait(gate, goal, min(seconds, _CHECK_SECONDS), self._spin - self._waited):
            self._waited += _CHECK_SECONDS
            seconds -= _CHECK_SECONDS
            missing = self._find_missing()
            if missing is None and seconds <= 0:
                return False
            if missing is not None and not core.wait(gate, goal, 0.0, 0.0):  # did not arrive first
                raise missing
        parity = self._begun & 1
        if a.dtype == np.float64:
            core.add(at, self._slots_at[parity], _SLOT_BYTES, self._size, a.size)
        else:
            rows = self._slots[parity].view(a.dtype)[:, : a.size]
            np.add.reduce(rows, axis=0, dtype=a.dtype, out=a.reshape(-1))
        return True


def create_shared_memory(
    store: Any, rank: int, size: int
) -> Generator[Poll, None, SharedMemory | None]:
    """Return the memory that all ranks share, or None if they do not share any. Collective.

    Yields the waits for other ranks. `store`, a part of torch.distributed's, has no other use.
    """
    memory, can_share = None, unavailable_reason() is None
    with ExitStack() as stack:  # until all ranks have tried to open the memory
        if rank == 0:
            offer: dict[str, Any] = {}
            if can_share:
                with suppress(OSError):
                    nbytes = _GATE_BYTES * (size + 1) + 2 * _SLOT_BYTES * size
                    offer, memory = stack.enter_context(_offer_memory(nbytes))
            store.set("offer", json.dumps(offer))
        else:
            yield wait_for_key(store, "offer")
            if can_share:
                memory = _open_memory(json.loads(store.get("offer")))
        keys = [f"rank {r}" for r in range(size)]
        store.set(keys[rank], json.dumps((memory is not None, os.getpid())))
        yield barrier(store, size)
    opened, pids = zip(*map(json.loads, store.multi_get(keys)), strict=True)
    return SharedMemory(memory, rank, [*pids]) if memory is not None and all(opened) else None


@contextmanager
def _offer_memory(nbytes: int) -> Iterator[tuple[dict[str, Any], mmap.mmap]]:
    """Create memory; yield (the offer by which another process can open it, the memory)."""
    # A random name, so that a process with the same pid, in a different container or on a different
    # machine, is not mistaken for this one.
    import fcntl  # needs Linux, like the calls below

    name = f"multibn-{secrets.token_hex(16)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        # Sealed: if a process truncated the memory, the others would be ended by SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.posix_fallocate(fd, 0, _TRIAL_BYTES)
        offer = {"pid": os.getpid(), "fd": fd, "name": name, "nbytes": nbytes}
        yield offer, mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _open_memory(offer: dict[str, Any]) -> mmap.mmap | None:
    """Open the memory that another process offers; None if this process cannot."""
    if "fd" not in offer:
        return None
    # int(), so that a malicious entry of the store cannot choose the path.
    path = f"/proc/{int(offer['pid'])}/fd/{int(offer['fd'])}"
    with suppress(OSError):
        if os.readlink(path) == f"/memfd:{offer['name']} (deleted)":
            with open(path, "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_size == offer["nbytes"]:
                    return mmap.mmap(file.fileno(), 0)
    return None


def unavailable_reason() -> str | None:
    """Return why this process cannot share memory, and what to do; None if it can."""
    switch = os.environ.get("MULTIBN_SHARED_MEMORY", "1")
    if switch not in ("0", "1"):
        raise ValueError(f"MULTIBN_SHARED_MEMORY must be 0 or 1: got {switch!r}.")
    if switch == "0":
        return "MULTIBN_SHARED_MEMORY is 0"
    if not hasattr(os, "memfd_create"):
        return "needs Linux"
    if core is None:
        return f"the C extension is missing. {how_to_build_core()}"
    try:
        with _offer_memory(_TRIAL_BYTES) as (offer, _):
            if _open_memory(offer) is None:
                return f"needs /proc: cannot open /proc/{offer['pid']}/fd/{offer['fd']}"
    except OSError as error:
        return f"cannot create shared memory: {error}"
    return None
