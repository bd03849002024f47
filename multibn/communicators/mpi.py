"""Communicator over MPI, by mpi4py: buffers, never pickles.

mpi4py is imported, and MPI thereby initialised, at the first use of a communicator and not before.
"""

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from multibn._arrays import is_on_host
from multibn._typing import Array
from multibn.communicators import SingleProcess
from multibn.communicators._handle import Watched
from multibn.communicators._host import allgather_bytes, from_host, to_host
from multibn.communicators._watch import Notice, Watch, check_timeout, default_timeout

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request


class MPI(Watched):
    """The processes of an mpi4py communicator.

    Arrays in host memory are reduced where they are. Arrays on a GPU are handed to an MPI that is
    CUDA-aware, which then knows no deadline, and otherwise go through the host; so do 16-bit types,
    as float32. Messages travel in duplicates of the communicator, where no other message can be
    taken for theirs.

    Parameters
    ----------
    comm
        An mpi4py communicator; default MPI.COMM_WORLD.
    cuda_aware
        Whether the MPI library takes pointers to GPU memory; default: ask it.
    timeout
        Seconds that a collective may take; default: MULTIBN_TIMEOUT, or 300. MPI itself would wait
        for ever.

    Raises
    ------
    ValueError
        If `comm` is MPI.COMM_NULL: this process is not part of it; or `timeout` is not positive.
    TypeError
        If `comm` is an intercommunicator.

    Attributes
    ----------
    world_ranks
        The processes' ranks in MPI.COMM_WORLD, in the order of their ranks here; None for all.
    """

    def __init__(
        self,
        comm: "Comm | None" = None,
        *,
        cuda_aware: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        self._comm = comm
        self.timeout = default_timeout() if timeout is None else check_timeout(timeout)
        self.world_ranks: tuple[int, ...] | None = None
        self._cuda_aware = cuda_aware
        self._links: _Links | None = None
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

    def allreduce_in(self, x: Array, /, *, channel: int, place: str, text: object) -> Array:
        if not is_on_host(x) and self._takes_device_array(x):
            return self._allreduce_on_device(x)
        links = self._found_links()
        return from_host(links.allreduce(to_host(x), channel, place, text, self.timeout), x)

    @property
    def agreements(self) -> dict[Any, Any]:
        return self._found_links().agreements

    def _found_links(self) -> "_Links":
        if self._links is None:
            self._links = _links(self.comm, self.timeout)
        return self._links

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
        self._found_links().revoke()
        return MPI(self.comm.Shrink(), cuda_aware=self._cuda_aware, timeout=self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world_ranks is not None and len(self.world_ranks) == 1:
            return SingleProcess, ()
        return _restore, (self.world_ranks, self._cuda_aware, self.timeout)

    def __repr__(self) -> str:
        ranks = "world" if self.world_ranks is None else list(self.world_ranks)
        return f"MPI(ranks={ranks})"

    def _takes_device_array(self, x: Array) -> bool:
        on_gpu = is_cupy_array(x) or (is_torch_array(x) and x.device.type == "cuda")
        if not on_gpu or x.dtype.itemsize < 4:
            return False
        return mpi_is_cuda_aware() if self._cuda_aware is None else self._cuda_aware

    def _allreduce_on_device(self, x: Array) -> Array:
        # MPI knows nothing of streams: what fills `x` must have finished.
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


class _Links:
    """What all handles of one mpi4py communicator have in common: its duplicates and its watch."""

    def __init__(self, comm: "Comm", timeout: float) -> None:
        self.watch = Watch(comm.rank, comm.size)
        self.agreements: dict[Any, Any] = {}
        self._lines: dict[int, _Line] = {}
        # Notices have a duplicate of their own; the others are made of it, out of reach of what the
        # program does with `comm` meanwhile.
        self._notices = self._duplicate(comm, timeout)
        self.watch.introduce(
            lambda data: allgather_bytes(
                lambda a: self.allreduce(a, 0, "", "the first exchange", timeout),
                comm.rank,
                comm.size,
                data,
            ),
            lambda _: _Board(self._notices),
        )

    def allreduce(
        self, a: np.ndarray[Any, Any], channel: int, place: str, text: object, timeout: float
    ) -> np.ndarray[Any, Any]:
        line = self._lines.get(channel)
        if line is None:
            line = self._lines[channel] = _Line(self._duplicate(self._notices, timeout), channel)
        if line.request is not None and a.dtype == line.sent.dtype:
            line.sent[:] = a
            self.watch.wait(line.begin, place, text, timeout)
            return line.received.copy()
        out = np.empty_like(a)
        self._wait(lambda: line.comm.Iallreduce(a, out), place, text, timeout)
        return out

    def revoke(self) -> None:
        """Interrupt whoever still waits in a message; this communicator is not used again."""
        for comm in (self._notices, *(line.comm for line in self._lines.values())):
            comm.Revoke()
        _watches.remove(self.watch)

    def _duplicate(self, comm: "Comm", timeout: float) -> "Comm":
        made: list[Comm] = []

        def start() -> "Request":
            duplicate, request = comm.Idup()
            made.append(duplicate)
            return request

        self._wait(start, "duplicate", "the opening of a channel", timeout)
        return made[0]

    def _wait(
        self, start: Callable[[], "Request"], place: str, text: object, timeout: float
    ) -> None:
        def begin() -> Callable[[float], bool]:
            request = start()
            return lambda seconds: _test(request, seconds)

        self.watch.wait(begin, place, text, timeout)


class _Line:
    """A channel's duplicate of the communicator.

    Messages that are all alike have a persistent request where MPI knows such (since 4.0): half of
    the time of a small one goes into making another.
    """

    def __init__(self, comm: "Comm", channel: int) -> None:
        self.comm = comm
        self.request: Any = None
        if channel > 0:
            self.sent, self.received = np.empty(channel), np.empty(channel)
            with suppress(NotImplementedError):
                self.request = comm.Allreduce_init(self.sent, self.received)

    def begin(self) -> Callable[[float], bool]:
        self.request.Start()
        return self._done

    def _done(self, seconds: float) -> bool:
        return _test(self.request, seconds)


class _Board:
    """Notices as messages to every other rank; only ranks that have waited long send any."""

    def __init__(self, comm: "Comm") -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._notices: dict[int, Notice] = {}
        self._sent: list[Any] = []  # requests and what they send, which must stay in memory

    def publish(self, notice: Notice, /) -> None:
        data = notice.encode()
        for rank in self._others:
            with _if_alive():
                self._sent.append((self._comm.Isend(data, rank), data))

    def read(self) -> dict[int, Notice]:
        from mpi4py import MPI as mpi

        status = mpi.Status()
        for rank in self._others:
            with _if_alive():
                while self._comm.Iprobe(rank, status=status):
                    data = bytearray(status.count)
                    self._comm.Recv(data, rank)
                    self._notices[rank] = Notice.decode(bytes(data))
        for pair in list(self._sent):
            with _if_alive():
                if pair[0].Test():
                    self._sent.remove(pair)
        return self._notices


def _if_alive() -> AbstractContextManager[None]:
    """For what an MPI with ULFM refuses to do with a rank that has died, by mpi4py's exception."""
    return suppress(RuntimeError)


# What to tell others at exit.
_watches: list[Watch] = []


def _links(comm: "Comm", timeout: float) -> _Links:
    """Collective over `comm` when it is first called for it."""
    links: Any = comm.Get_attr(_keyval())
    if links is None:
        links = _Links(comm, timeout)
        comm.Set_attr(_keyval(), links)
        _watches.append(links.watch)
    return cast(_Links, links)


@cache
def _keyval() -> int:
    """Key under which MPI keeps our links with the communicator, and lets go of them with it."""
    from mpi4py import MPI as mpi

    atexit.register(_leave)
    return mpi.Comm.Create_keyval()


def _test(request: "Request", seconds: float) -> bool:
    """Whether a request completes within that time."""
    if request.Test():
        return True
    start = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - start
        if waited >= seconds:
            return False
        # Other ranks may need this core: give it away, after a while for longer.
        if waited < 0.1:
            os.sched_yield()
        else:
            time.sleep(5e-5)
    return True


def _leave() -> None:
    """At exit, before MPI's own: nobody may be left to wait for this process."""
    # `last_type` is where Python keeps an exception that has ended the program. MPI would wait for
    # the other ranks now, and they for this one; nor can it end with a message under way.
    failed = any(watch.failure for watch in _watches)
    if failed or getattr(sys, "last_type", None) is not None:
        _abort()
    for watch in _watches:
        watch.leave()


def _abort() -> None:
    from mpi4py import MPI as mpi

    if mpi.COMM_WORLD.size > 1 and not mpi.Is_finalized():
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


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
