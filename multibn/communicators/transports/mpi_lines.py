"""Lines over MPI: duplicates of a communicator, and what MPI lets go of with the communicator."""

import os
import sys
from collections.abc import Generator
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from multibn.communicators.lines import (
    HostArray,
    Lines,
    Transport,
    after_fork,
    seconds_of_offers,
)
from multibn.communicators.notices import Board, Notice
from multibn.communicators.watch import Done, poll

if TYPE_CHECKING:
    from mpi4py.MPI import Comm


_OFTEN = 50  # messages after which a line is worth a persistent request


class MPITransport(Transport):
    """Duplicates of an mpi4py communicator, out of reach of the program's other messages."""

    def __init__(self, comm: "Comm") -> None:
        self.rank, self.size = comm.rank, comm.size
        self.duplicates: list[Comm] = []
        self.requests: list[Any] = []  # persistent ones
        self._comm = comm
        self._board: _Board | None = None

    def open_line(
        self, number: int, buffer: HostArray | None, timeout: float
    ) -> "Generator[None, None, _Line]":
        # After the first, duplicates of a duplicate: the program may use `comm` meanwhile.
        source = self.duplicates[0] if self.duplicates else self._comm
        duplicate, request = source.Idup()
        self.duplicates.append(duplicate)
        while not request.Test():
            yield
        return _Line(duplicate, buffer, self.requests)

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

    def free(self, *, failed: bool) -> None:
        for each in () if failed else (*self.requests, *reversed(self.duplicates)):
            each.Free()
        self.requests, self.duplicates = [], []


class _Line:
    """A duplicate of the communicator.

    Messages that are sent often from one buffer have a persistent request where MPI knows such
    (since 4.0): making a new request takes half of the time of a small message. Lines of few
    messages have none, since Open MPI 5.0 never frees the working memory of such a request, which
    is as long as the message: groups made and destroyed again and again would add up.
    """

    def __init__(self, comm: "Comm", buffer: HostArray | None, requests: list[Any]) -> None:
        self._requests = requests
        self._comm = comm
        self._buffer = buffer
        self._num_begun = 0
        self._request: Any = None
        self._done: Any = None  # of the persistent request
        from mpi4py import MPI as mpi

        self._in_place: Any = mpi.IN_PLACE
        self._offers = _seconds_of_offers()

    def begin(self, a: HostArray) -> Done:
        self._num_begun += 1
        if self._num_begun == _OFTEN and self._buffer is not None:
            self._keep_request(self._buffer)  # collective: all ranks have begun as many
        if a is self._buffer and self._request is not None:
            self._request.Start()
            return self._done
        request = self._comm.Iallreduce(self._in_place, a)
        return partial(poll, request.Test, offers=self._offers)

    def _keep_request(self, buffer: HostArray) -> None:
        with suppress(NotImplementedError):
            self._request = self._comm.Allreduce_init(self._in_place, buffer)
            self._requests.append(self._request)
            self._done = partial(poll, self._request.Test, offers=self._offers)


class _Board(Board):
    """Notices as messages to every other rank; only ranks that have waited long send any.

    MPI delivers what was sent, and forgets it with the group.

    An MPI with ULFM refuses messages to and from dead ranks, which mpi4py makes a RuntimeError.
    """

    def __init__(self, comm: "Comm") -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._notices: dict[int, Notice] = {}
        self._sent: list[Any] = []  # requests and what they send, which must stay in memory

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


after_fork(_after_fork)


def lines_of(comm: "Comm") -> Lines:
    """The lines of all handles of one mpi4py communicator."""
    lines: Any = comm.Get_attr(_keyval())
    if lines is None:
        lines = Lines(MPITransport(comm))
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


@cache
def _seconds_of_offers() -> float:
    # Open MPI's name, MPICH's and Intel MPI's.
    names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    return seconds_of_offers(max(int(os.environ.get(name, "1")) for name in names))
