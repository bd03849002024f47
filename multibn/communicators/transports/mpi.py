"""Communicator over MPI, by mpi4py: buffers, never pickles.

mpi4py is imported, and MPI thereby initialised, at the first use of a communicator and not before.
"""

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from multibn.communicators.base import SingleProcess
from multibn.communicators.lines import LineCommunicator, Lines
from multibn.communicators.transports.mpi_lines import lines_of
from multibn.communicators.watch import check_timeout

if TYPE_CHECKING:
    from mpi4py.MPI import Comm


class MPI(LineCommunicator):
    """The processes of an mpi4py communicator.

    Messages travel in duplicates of the communicator, so that no message of the program can be
    taken for one of multibn's. Arrays on a GPU go through host memory.

    Parameters
    ----------
    comm
        An mpi4py communicator; default MPI.COMM_WORLD.
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
    >>> from multibn.communicators.transports.mpi import MPI
    >>> communicator = MPI(timeout=60)
    >>> communicator.allreduce(np.asarray([1.0, 10.0]))
    array([ 2., 20.])
    >>> communicator.split(communicator.rank).size
    1
    """

    def __init__(self, comm: "Comm | None" = None, *, timeout: float | None = None) -> None:
        self.timeout = check_timeout(timeout)
        self.world_ranks: tuple[int, ...] | None = None
        if comm is None:
            return
        self.mpi_comm = comm
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
            group, world = comm.group, mpi.COMM_WORLD.group
            ranks = mpi.Group.Translate_ranks(group, range(group.size), world)
            self.world_ranks = tuple(ranks)

    @property
    def comm(self) -> "Comm":
        """The mpi4py communicator."""
        return self.mpi_comm

    @cached_property
    def mpi_comm(self) -> "Comm":
        """As `comm`, where a class derives from this one, too."""
        return find_comm(self.world_ranks)

    @property
    def rank(self) -> int:
        return self.mpi_comm.rank

    @property
    def size(self) -> int:
        return self.mpi_comm.size

    @cached_property
    def lines(self) -> Lines:
        return lines_of(self.mpi_comm)

    def split(self, color: int, key: int = 0) -> "MPI":
        return MPI(self.comm.Split(color, key), timeout=self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world_ranks is not None and len(self.world_ranks) == 1:
            return SingleProcess, ()
        return _restore, (self.world_ranks, self.timeout)

    def __repr__(self) -> str:
        ranks = "world" if self.world_ranks is None else list(self.world_ranks)
        return f"MPI(ranks={ranks})"


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


def _restore(world_ranks: tuple[int, ...] | None, timeout: float) -> MPI:
    restored = MPI(timeout=timeout)
    restored.world_ranks = world_ranks
    return restored
