"""Communicator over MPI, by mpi4py: buffers, never pickles.

mpi4py is imported, and MPI thereby initialised, at the first use of a communicator and not before.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from multibn import wire
from multibn._typing import HostArray
from multibn.communicators.channel import (
    Begin,
    Channel,
    ChannelCommunicator,
    Transport,
    spin_seconds,
)
from multibn.communicators.communicator import Outside, SingleProcess
from multibn.communicators.diagnostics import warn_if_launched
from multibn.communicators.exit import inherited, watched_channels
from multibn.communicators.polling import Poll, poll
from multibn.communicators.watchdog import Status

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_BLOCK_NUMBERS = wire.length(128)  # of a message's first part: enough for 128 channels
_SPIN_POLLS = 20  # of some 0.2 us each, before a rank waits
_PERSISTENT_AFTER_USES = 50  # sums of one memory after which a persistent request pays


class MPI(ChannelCommunicator):
    """The processes of an mpi4py communicator.

    Messages travel in a duplicate of the communicator, so that no message of the program can be
    taken for one of multibn's. Arrays on a GPU go through host memory.

    Parameters
    ----------
    comm
        An mpi4py communicator; default MPI.COMM_WORLD.

    Attributes
    ----------
    world_ranks
        Ranks in MPI.COMM_WORLD, in the order of this communicator; None for COMM_WORLD.

    Raises
    ------
    ValueError
        If `comm` is MPI.COMM_NULL: this process is not part of it.
    TypeError
        If `comm` is an intercommunicator.

    Examples
    --------
    On each of two ranks, under `mpiexec -n 2 python -m mpi4py`:

    >>> import numpy as np
    >>> from multibn.communicators.transports.mpi import MPI
    >>> communicator = MPI()
    >>> communicator.allreduce(np.asarray([1.0, 10.0]))
    array([ 2., 20.])
    >>> communicator.split(communicator.rank).size
    1
    """

    def __init__(self, comm: "Comm | None" = None) -> None:
        self.world_ranks: tuple[int, ...] | None = None
        if comm is None:
            return
        self.mpi_comm = comm
        from mpi4py import MPI as mpi

        if comm == mpi.COMM_NULL:
            Outside(comm).rank  # noqa: B018 - raises
        if comm.is_inter:
            raise TypeError(
                "the communicator must be an intracommunicator: got an intercommunicator. "
                "Merge its two groups first: comm.Merge()."
            )
        # A world of one process has the group of COMM_SELF, which must stay this process alone.
        group, world = comm.group, mpi.COMM_WORLD.group
        if mpi.Group.Compare(group, world) != mpi.IDENT or comm == mpi.COMM_SELF:
            self.world_ranks = tuple(mpi.Group.Translate_ranks(group, range(group.size), world))

    @cached_property
    def mpi_comm(self) -> "Comm":
        """The mpi4py communicator."""
        return _find_comm(self.world_ranks)

    @property
    def native(self) -> Any:
        """The mpi4py communicator."""
        return self.mpi_comm

    @property
    def rank(self) -> int:
        return self.mpi_comm.rank

    @property
    def size(self) -> int:
        return self.mpi_comm.size

    @cached_property
    def channel(self) -> Channel:
        channel: Any = self.mpi_comm.Get_attr(_keyval())
        if channel is None:
            channel = Channel(_Transport(self.mpi_comm))
            if "mpi" in inherited:
                channel.abandon_after_fork()
            self.mpi_comm.Set_attr(_keyval(), channel)
        return cast(Channel, channel)

    def split(self, color: int, key: int = 0) -> "MPI":
        return MPI(self.mpi_comm.Split(color, key))

    @property
    def identity(self) -> object:
        # Processes of `Comm.Spawn` have no rank in the world: MPI.UNDEFINED, which is negative.
        return self.channel if min(self.world_ranks or (0,)) < 0 else super().identity

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world_ranks is not None and len(self.world_ranks) == 1:
            return SingleProcess, ()
        return _restore, (self.world_ranks,)

    def __repr__(self) -> str:
        ranks = "world" if self.world_ranks is None else list(self.world_ranks)
        return f"MPI(ranks={ranks})"


@cache
def _find_comm(world_ranks: tuple[int, ...] | None) -> "Comm":
    """The communicator of ranks of MPI.COMM_WORLD, None for all. Collective in its first call."""
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


def _restore(world_ranks: tuple[int, ...] | None) -> MPI:
    restored = MPI()
    restored.world_ranks = world_ranks
    return restored


class _Transport(Transport):
    """A duplicate of an mpi4py communicator, out of reach of the program's other messages.

    As the group's status board, it sends messages to every other rank; only ranks that have waited
    long send any. MPI delivers them, and forgets them with the group.
    """

    def __init__(self, comm: "Comm") -> None:
        self.rank, self.size = comm.rank, comm.size
        self.block = np.zeros(_BLOCK_NUMBERS)
        self._comm = comm
        self.duplicate: Any = None  # of the communicator, until that is freed
        self.requests: list[Any] = []  # persistent ones
        self._notices: dict[int, Status] = {}
        self._sent: list[Any] = []  # requests and what they send, which must stay in memory
        self.spin_seconds = spin_seconds()
        from mpi4py import MPI as mpi

        if self.size == mpi.COMM_WORLD.size == 1 and comm != mpi.COMM_SELF:
            warn_if_launched(
                "MPI.COMM_WORLD has 1 process",
                "start the program by the mpiexec of the MPI that mpi4py uses, or, under Slurm, by "
                "srun --mpi=pmix",
            )

    def open(self) -> "Iterator[Poll]":
        self.duplicate, request = self._comm.Idup()
        yield partial(poll, request.Test)
        # Collectives and point-to-point messages of one communicator do not meet.
        self.board, self.carrier = self, "mpi"
        self._begin_block = self.prepare(self.block)

    def prepare_block(self, n: int) -> Begin:
        return self._begin_block  # of all messages: ranks then begin the block equally often

    def prepare(self, a: HostArray) -> Begin:
        return _Sum(self, a).begin

    def end_process(self, *, failed: bool) -> None:
        # MPI_Finalize would wait for the other ranks, and they for this one; nor can MPI be
        # finalized with a message under way.
        from mpi4py import MPI as mpi

        if failed and mpi.COMM_WORLD.size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)

    def close(self, *, failed: bool, at_exit: bool = False) -> None:
        if failed or at_exit:  # MPI frees nothing with a message pending, nor without the others
            return
        for each in (*self.requests, self.duplicate):
            if each is not None:
                each.Free()
        self.requests, self.duplicate = [], None

    def publish(self, notice: Status, /) -> None:
        data = json.dumps(notice).encode()
        for rank in range(self.size):
            if rank != self.rank:
                self._sent.append((self.duplicate.Isend(data, rank), data))

    def read(self) -> dict[int, Status]:
        from mpi4py import MPI as mpi

        status = mpi.Status()
        while self.duplicate.Iprobe(status=status):  # from any rank
            data = bytearray(status.count)
            self.duplicate.Recv(data, status.source)
            self._notices[status.source] = Status(*json.loads(data))
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]
        return self._notices


class _Sum:
    """A sum of one memory, which all ranks begin equally often.

    One that is begun often has a persistent request where MPI knows such (since 4.0): making a new
    request takes half of the time of a small message. One of few messages has none, since Open MPI
    5.0 never frees the working memory of such a request: groups made and destroyed again and again
    would add up.
    """

    def __init__(self, transport: _Transport, memory: HostArray) -> None:
        from mpi4py import MPI as mpi

        self._transport, self._arguments = transport, (mpi.IN_PLACE, memory)
        self._num_begun = 0
        self._request: Any = None  # the persistent one

    def begin(self) -> Poll | None:
        request, duplicate = self._request, self._transport.duplicate
        if request is None:
            self._num_begun += 1
            if self._num_begun == _PERSISTENT_AFTER_USES:
                with suppress(NotImplementedError):
                    request = self._request = duplicate.Allreduce_init(*self._arguments)
                    self._transport.requests.append(request)
        if request is None:
            request = duplicate.Iallreduce(*self._arguments)
        else:
            request.Start()
            for _ in range(_SPIN_POLLS):
                if request.Test():
                    return None
        return partial(poll, request.Test, spin_seconds=self._transport.spin_seconds)


@cache
def _keyval() -> int:
    """The key under which MPI keeps the channel with the communicator, and lets go of both."""
    from mpi4py import MPI as mpi

    # MPI_Finalize begins with the attributes of this one, while MPI still works.
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_on_finalize), None)
    return mpi.Comm.Create_keyval(delete_fn=_on_free)


def _on_free(comm: "Comm", keyval: int, channel: Channel) -> None:
    """The user frees a communicator, which is collective; or MPI_Finalize frees the world."""
    from mpi4py import MPI as mpi

    if "mpi" not in inherited and comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        channel.close()


def _on_finalize(*_: object) -> None:
    """Send nothing at the end of the process: MPI can no longer be used."""
    for channel in list(watched_channels):
        if isinstance(channel.transport, _Transport):
            watched_channels.discard(channel)
