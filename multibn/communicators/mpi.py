"""Communicator over MPI, by mpi4py: buffers, never pickles.

mpi4py is imported, and MPI thereby initialised, at the first use of a communicator and not before.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from array_api_compat import is_cupy_array, is_torch_array

from multibn import message
from multibn._typing import Array
from multibn.communicators._lines import HostArray, LineCommunicator, Lines, Transport
from multibn.communicators._watch import Done, Notice, check_timeout
from multibn.communicators.base import SingleProcess

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request


class MPI(LineCommunicator):
    """The processes of an mpi4py communicator.

    Messages travel in duplicates of the communicator, so that no message of the program can be
    taken for one of multibn's. Arrays on a GPU are handed to an MPI that is CUDA-aware, without a
    deadline, and go through host memory otherwise; 16-bit arrays always do, as float32.

    Parameters
    ----------
    comm
        An mpi4py communicator; default MPI.COMM_WORLD.
    cuda_aware
        Whether the MPI library takes pointers to GPU memory; default: ask it.
    timeout
        Seconds that a collective may take; default: MULTIBN_TIMEOUT, or 300. MPI itself would wait
        for ever.

    Attributes
    ----------
    world_ranks
        The processes' ranks in MPI.COMM_WORLD, in the order of their ranks here; None for all.

    Raises
    ------
    ValueError
        If `comm` is MPI.COMM_NULL: this process is not part of it; or `timeout` is not positive.
    TypeError
        If `comm` is an intercommunicator.

    Examples
    --------
    On each of two ranks, under `mpiexec -n 2 python -m mpi4py`:

    >>> import numpy as np
    >>> from multibn.communicators.mpi import MPI
    >>> communicator = MPI(timeout=60)
    >>> communicator.allreduce(np.asarray([1.0, 10.0]))
    array([ 2., 20.])
    >>> communicator.split(communicator.rank).size
    1
    """

    def __init__(
        self,
        comm: "Comm | None" = None,
        *,
        cuda_aware: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        self._comm = comm
        self.timeout = check_timeout(timeout)
        self.world_ranks: tuple[int, ...] | None = None
        self._cuda_aware = cuda_aware
        if comm is None:
            return
        from mpi4py import MPI as mpi

        if comm == mpi.COMM_NULL:
            raise ValueError(
                "this process is not part of the communicator: got MPI.COMM_NULL on world rank "
                f"{mpi.COMM_WORLD.rank}. Give each process the communicator it belongs to."
            )
        if comm.is_inter:
            raise TypeError(
                "the communicator must be an intracommunicator: got an intercommunicator. "
                "Merge its two groups first: comm.Merge()."
            )
        # A world of one process is congruent to COMM_SELF, which must stay this process alone.
        is_world = mpi.Comm.Compare(comm, mpi.COMM_WORLD) in (mpi.IDENT, mpi.CONGRUENT)
        if not is_world or comm == mpi.COMM_SELF:
            self.world_ranks = _ranks_in_world(comm)

    @property
    def comm(self) -> "Comm":
        """The mpi4py communicator."""
        if self._comm is None:
            self._comm = find_comm(self.world_ranks)
        return self._comm

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @cached_property
    def lines(self) -> Lines:
        return _lines_of(self.comm)

    def takes(self, x: Array, /) -> bool:
        on_gpu = is_cupy_array(x) or (is_torch_array(x) and x.device.type == "cuda")
        if not on_gpu or x.dtype.itemsize < 4:
            return False
        return mpi_is_cuda_aware() if self._cuda_aware is None else self._cuda_aware

    def allreduce_on_device(self, x: Array, /) -> Array:
        # MPI knows nothing of streams: the kernels that fill `x` must have ended.
        if is_cupy_array(x):
            import cupy

            x = cupy.ascontiguousarray(x)
            out = cupy.empty_like(x)
            cupy.cuda.get_current_stream().synchronize()
        else:
            import torch

            x = x.detach().contiguous()
            out = torch.empty_like(x)
            torch.cuda.current_stream(x.device).synchronize()
        self.comm.Allreduce(x, out)
        return out

    def split(self, color: int, key: int = 0) -> "MPI":
        comm = self.comm.Split(color, key)
        return MPI(comm, cuda_aware=self._cuda_aware, timeout=self.timeout)

    def shrink(self) -> "MPI":
        """Communicator of the ranks that are left after others have died. Collective over those.

        For MPI libraries with ULFM, where the launcher lets the survivors go on: Open MPI's under
        `mpiexec --with-ft ulfm --mca async_mpi_finalize 1`; without the second, the barrier in
        MPI_Finalize now and then waits for the dead for ever. Call it after a ConnectionError, and
        give the layers what it returns: `layer.process_group = shrunk`.
        """
        transport = self.lines.transport
        assert isinstance(transport, _Transport)
        for comm in transport.duplicates:  # interrupts the ranks that still wait in a message
            comm.Revoke()
        self.lines.abandon()
        return MPI(self.comm.Shrink(), cuda_aware=self._cuda_aware, timeout=self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world_ranks is not None and len(self.world_ranks) == 1:
            return SingleProcess, ()
        return _restore, (self.world_ranks, self._cuda_aware, self.timeout)

    def __repr__(self) -> str:
        ranks = "world" if self.world_ranks is None else list(self.world_ranks)
        return f"MPI(ranks={ranks})"


_SHORTEST = 2**7  # numbers: the moments of 64 channels. Shorter messages take as long.


class _Transport(Transport):
    """Duplicates of an mpi4py communicator, out of reach of the program's other messages."""

    def __init__(self, comm: "Comm") -> None:
        self.rank, self.size = comm.rank, comm.size
        self.duplicates: list[Comm] = []
        self.requests: list[Any] = []  # persistent ones
        self._comm = comm
        self._board: _Board | None = None

    def open_line(self, number: int, buffer: HostArray | None, timeout: float) -> "_Line":
        # After the first, duplicates of a duplicate: the program may use `comm` meanwhile.
        source = self.duplicates[0] if self.duplicates else self._comm
        duplicate, request = source.Idup()
        self.duplicates.append(duplicate)
        return _Line(duplicate, request, buffer, self.requests)

    def line_length(self, length: int) -> int:
        # A duplicate takes 40 kB, and the library has 65,000 of them at most.
        extras = message.length(0)  # beside the moments
        return max(_SHORTEST, 1 << (length - extras - 1).bit_length()) + extras

    @property
    def board(self) -> "_Board | None":
        # Collectives and point-to-point messages of one communicator do not meet.
        if self._board is None and self.duplicates:
            self._board = _Board(self.duplicates[0])
        return self._board

    def abort(self) -> None:
        # MPI_Finalize would wait for the other ranks, and they for this one; nor can MPI be
        # finalized with a message under way.
        from mpi4py import MPI as mpi

        if mpi.COMM_WORLD.size > 1 and not mpi.Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)

    def disown(self) -> None:
        """What a fork has inherited of MPI is not to be touched."""

    def release(self, *, failed: bool) -> None:
        if failed:
            return
        for request in self.requests:
            request.Free()
        for duplicate in reversed(self.duplicates):
            duplicate.Free()
        self.requests.clear()
        self.duplicates.clear()

    def close(self, *, failed: bool) -> None:
        """MPI_Finalize, which mpi4py calls, lets go of the duplicates."""


class _Line:
    """A duplicate of the communicator.

    Messages that are sent from one buffer have a persistent request where MPI knows such (since
    4.0): making a new request takes half of the time of a small message.
    """

    def __init__(
        self,
        comm: "Comm",
        duplication: "Request",
        buffer: HostArray | None,
        requests: list[Any],
    ) -> None:
        self._requests = requests
        self._comm = comm
        self._duplication = duplication
        self._buffer = buffer
        self._request: Any = None
        self._done: Any = None  # of the persistent request
        from mpi4py import MPI as mpi

        self._in_place: Any = mpi.IN_PLACE

    def opened(self, seconds: float) -> bool:
        if not _test(self._duplication, seconds):
            return False
        if self._buffer is not None:
            with suppress(NotImplementedError):
                self._request = self._comm.Allreduce_init(self._in_place, self._buffer)
                self._requests.append(self._request)
                self._done = partial(_test, self._request)
        return True

    def begin(self, a: HostArray) -> Done:
        if a is self._buffer and self._request is not None:
            self._request.Start()
            return self._done
        return partial(_test, self._comm.Iallreduce(self._in_place, a))


class _Board:
    """Notices as messages to every other rank; only ranks that have waited long send any.

    An MPI with ULFM refuses messages to and from dead ranks, which mpi4py makes a RuntimeError.
    """

    def __init__(self, comm: "Comm") -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._notices: dict[int, Notice] = {}
        self._sent: list[Any] = []  # requests and what they send, which must stay in memory

    def close(self) -> None:
        """MPI delivers what was sent."""

    def publish(self, notice: Notice, /) -> None:
        data = notice.encode()
        for rank in self._others:
            with suppress(RuntimeError):
                self._sent.append((self._comm.Isend(data, rank), data))

    def read(self) -> dict[int, Notice]:
        from mpi4py import MPI as mpi

        status = mpi.Status()
        for rank in self._others:
            with suppress(RuntimeError):
                while self._comm.Iprobe(rank, status=status):
                    data = bytearray(status.count)
                    self._comm.Recv(data, rank)
                    self._notices[rank] = Notice.decode(bytes(data))
        for pair in list(self._sent):
            with suppress(RuntimeError):
                if pair[0].Test():
                    self._sent.remove(pair)
        return self._notices


_inherited = False  # whether this process is a fork of one that had initialised MPI


def _after_fork() -> None:
    global _inherited
    loaded = sys.modules.get("mpi4py.MPI")
    _inherited = loaded is not None and loaded.Is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def _lines_of(comm: "Comm") -> Lines:
    """The lines of all handles of one mpi4py communicator."""
    lines: Any = comm.Get_attr(_keyval())
    if lines is None:
        lines = Lines(_Transport(comm))
        if _inherited:
            lines.disown()
        comm.Set_attr(_keyval(), lines)
    return cast(Lines, lines)


@cache
def _keyval() -> int:
    """The key under which MPI keeps the lines with the communicator, and lets go of both."""
    from mpi4py import MPI as mpi

    return mpi.Comm.Create_keyval(delete_fn=_on_free)


def _on_free(comm: "Comm", keyval: int, lines: Lines) -> None:
    """The user frees a communicator, which is collective; or MPI_Finalize frees the world."""
    from mpi4py import MPI as mpi

    if not _inherited and comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        lines.release()


def _test(request: "Request", seconds: float) -> bool:
    """Whether a request completes within that time."""
    if request.Test():
        return True
    start = time.monotonic()
    nap = _SHORTEST_NAP
    while not request.Test():
        waited = time.monotonic() - start
        if waited >= seconds:
            return False
        # Other ranks may need this core: offer it, and after a while leave it to them.
        if waited < _yielding():
            os.sched_yield()
        else:
            time.sleep(nap)
            nap = min(1.1 * nap, _LONGEST_NAP)
    return True


_SHORTEST_NAP, _LONGEST_NAP = 5e-5, 1e-3  # seconds


@cache
def _yielding() -> float:
    """Seconds in which a waiting rank only offers its core, and wakes without delay.

    Few where ranks outnumber the cores: the kernel would spend its time on their offers.
    """
    # Open MPI's name, MPICH's and Intel MPI's.
    names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    ranks = max(int(os.environ.get(name, "1")) for name in names)
    return 2e-4 if ranks > len(os.sched_getaffinity(0)) else 0.1


@cache
def find_comm(world_ranks: tuple[int, ...] | None) -> "Comm":
    """The communicator of these ranks of MPI.COMM_WORLD, None for all of them.

    Collective over those ranks when it is first called for them.
    """
    from mpi4py import MPI as mpi

    world = mpi.COMM_WORLD
    if world_ranks is None:
        return world
    if world.rank not in world_ranks or max(world_ranks) >= world.size:
        raise RuntimeError(
            f"the communicator was made for ranks {list(world_ranks)} of MPI.COMM_WORLD, and this "
            f"is rank {world.rank} of {world.size}. Give the layer another communicator, None for "
            "this process alone."
        )
    return world.Create_group(world.group.Incl(world_ranks))


@cache
def mpi_is_cuda_aware() -> bool:
    """Whether the MPI library takes pointers to GPU memory, as far as it tells."""
    from mpi4py import MPI as mpi

    # MPI 4.1: libraries list the kinds of memory that they support.
    kinds = dict(mpi.COMM_WORLD.Get_info().items()).get("mpi_memory_alloc_kinds", "")
    if "cuda" in kinds.split(","):
        return True
    try:  # Open MPI's extension, in the library that mpi4py has loaded
        return bool(ctypes.CDLL("libmpi.so.40").MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


def _ranks_in_world(comm: "Comm") -> tuple[int, ...]:
    from mpi4py import MPI as mpi

    group = comm.group
    return tuple(mpi.Group.Translate_ranks(group, range(group.size), mpi.COMM_WORLD.group))


def _restore(world_ranks: tuple[int, ...] | None, cuda_aware: bool | None, timeout: float) -> MPI:
    restored = MPI(cuda_aware=cuda_aware, timeout=timeout)
    restored.world_ranks = world_ranks
    return restored
