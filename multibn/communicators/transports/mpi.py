"""Communicator over MPI (mpi4py), which sends buffers and never pickles.

The first use of a communicator imports mpi4py, which initializes MPI.
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
from multibn.communicators.channel import Begin, Channel, ChannelCommunicator, Transport
from multibn.communicators.communicator import SingleProcess
from multibn.communicators.diagnostics import warn_if_launched
from multibn.communicators.exit import inherited, watched_channels
from multibn.communicators.polling import Poll, poll, spin_seconds
from multibn.communicators.watchdog import Status

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_BLOCK_NUMBERS = wire.length(128)  # a message of 128 channels fits in the block
_SPIN_POLLS = 20  # of about 0.2 us each, before a rank waits with a deadline
_PERSISTENT_AFTER_USES = 50  # sums of one buffer, after which a persistent request pays off


class MPI(ChannelCommunicator):
    """The processes of an mpi4py communicator.

    Messages travel in a duplicate of the communicator, so that they cannot be confused with the
    program's own. Arrays on a GPU go through host memory.

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

        if comm.is_inter:
            raise TypeError(
                "the communicator must be an intracommunicator: got an intercommunicator. "
                "Merge its two groups first: comm.Merge()."
            )
        # In a world of one process, COMM_SELF has the group of COMM_WORLD. Its pickle must mean one
        # process all the same, if a larger world loads it.
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
        # The world rank of a process outside COMM_WORLD (`Comm.Spawn`) is MPI.UNDEFINED, below 0.
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
    """Return the communicator of these world ranks (None: all). The first call is collective."""
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
    """Transport over a duplicate of an mpi4py communicator, and the group's status board.

    Status notices are point-to-point messages to every other rank. Only ranks that have waited long
    send any.
    """

    def __init__(self, comm: "Comm") -> None:
        self.rank, self.size = comm.rank, comm.size
        self.block = np.zeros(_BLOCK_NUMBERS)
        self._comm = comm
        self.duplicate: Any = None  # of `_comm`; None before `open` and after `close`
        self.requests: list[Any] = []  # the persistent requests
        self._notices: dict[int, Status] = {}
        self._sent: list[Any] = []  # (request, data) of sends: the data must stay in memory
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
        # Sums and notices share it: MPI never matches collectives with point-to-point messages.
        self.board, self.carrier = self, "mpi"
        self._begin_block = self.prepare(self.block)

    def prepare_block(self, n: int) -> Begin:
        return self._begin_block  # all ranks must begin the same sum, whatever their `n`

    def prepare(self, a: HostArray) -> Begin:
        """Return a function that begins to sum `a` in place; ranks must call it equally often.

        A sum that is begun often uses a persistent request (MPI 4.0), because creating a new
        request takes half of the time of a small message. Other sums do not: Open MPI 5.0 never
        frees the memory of a persistent request, so creating and destroying many groups would leak.
        """
        from mpi4py import MPI as mpi

        persistent: Any = None
        num_begun = 0

        def begin() -> Poll | None:
            nonlocal persistent, num_begun
            num_begun += 1
            if num_begun == _PERSISTENT_AFTER_USES:
                with suppress(NotImplementedError):
                    persistent = self.duplicate.Allreduce_init(mpi.IN_PLACE, a)
                    self.requests.append(persistent)
            if persistent is None:
                request = self.duplicate.Iallreduce(mpi.IN_PLACE, a)
            else:
                request = persistent
                request.Start()
                for _ in range(_SPIN_POLLS):
                    if request.Test():
                        return None
            return partial(poll, request.Test, spin_seconds=self.spin_seconds)

        return begin

    def end_process(self, *, failed: bool) -> None:
        # MPI_Finalize would wait for the other ranks, which wait for this one. Nor can MPI be
        # finalized while a message is pending.
        from mpi4py import MPI as mpi

        if failed and mpi.COMM_WORLD.size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)

    def close(self, *, failed: bool, at_exit: bool = False) -> None:
        if failed or at_exit:  # Free needs all ranks, and no pending message
            return
        for each in filter(None, (*self.requests, self.duplicate)):
            each.Free()
        self.requests, self.duplicate = [], None

    def publish(self, notice: Status, /) -> None:
        data = json.dumps(notice).encode()
        others = {*range(self.size)} - {self.rank}
        self._sent += [(self.duplicate.Isend(data, rank), data) for rank in others]

    def read(self) -> dict[int, Status]:
        from mpi4py import MPI as mpi

        status = mpi.Status()
        while self.duplicate.Iprobe(status=status):  # from any rank
            data = bytearray(status.count)
            self.duplicate.Recv(data, status.source)
            self._notices[status.source] = Status(*json.loads(data))
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]
        return self._notices


@cache
def _keyval() -> int:
    """Return the key of the communicator attribute in which MPI stores the channel."""
    from mpi4py import MPI as mpi

    # MPI_Finalize first deletes the attributes of COMM_SELF, while MPI still works.
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_on_finalize), None)
    return mpi.Comm.Create_keyval(delete_fn=_on_free)


def _on_free(comm: "Comm", keyval: int, channel: Channel) -> None:
    """Close the channel if the user frees the communicator, but not in MPI_Finalize."""
    from mpi4py import MPI as mpi

    if "mpi" not in inherited and comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        channel.close()


def _on_finalize(*_: object) -> None:
    """Skip the MPI channels in the exit handler: MPI can no longer be used then."""
    for channel in list(watched_channels):
        if isinstance(channel.transport, _Transport):
            watched_channels.discard(channel)
