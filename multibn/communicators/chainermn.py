"""Communicator over one of ChainerMN's, with its rules for the communication backend."""

from functools import cache
from typing import Any

from multibn._typing import Array
from multibn.communicators import SingleProcess, nccl
from multibn.communicators._handle import Handle
from multibn.communicators._host import through_host


class ChainerMN(Handle):
    """The processes of a ChainerMN communicator.

    Parameters
    ----------
    comm
        Any communicator of `chainermn.create_communicator`, or one derived from its classes.
    communication_backend
        `"mpi"`, `"nccl"` or `"auto"`, which is NCCL with a pure_nccl communicator and MPI with any
        other. Arrays in host memory go over MPI in any case, and over MPI, arrays on a GPU go
        through the host.

    Raises
    ------
    ValueError
        If `communication_backend` is none of the three, or is `"nccl"` and `comm` is not pure_nccl.
    """

    def __init__(self, comm: Any, communication_backend: str = "auto") -> None:
        self._comm = comm
        self._recipe: tuple[type, tuple[int, ...] | None] | None = None
        self.communication_backend = select_backend(type(comm), communication_backend)

    @property
    def comm(self) -> Any:
        """The ChainerMN communicator."""
        if self._comm is None:
            assert self._recipe is not None
            self._comm = _find_comm(*self._recipe)
        return self._comm

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def allreduce(self, x: Array, /) -> Array:
        if self.communication_backend == "nccl" and nccl.is_on_gpu(x):
            self.comm._init_comms()  # ChainerMN makes its NCCL communicator when it is first needed
            return nccl.allreduce(self.comm.nccl_comm, x)
        return through_host(x, self.comm.allreduce)

    def split(self, color: int, key: int = 0) -> "ChainerMN":
        return ChainerMN(self.comm.split(color, key), self.communication_backend)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._recipe is None:
            from multibn.communicators.mpi import MPI

            self._recipe = type(self._comm), MPI(self._comm.mpi_comm).world_ranks
        if self._recipe[1] is not None and len(self._recipe[1]) == 1:
            return SingleProcess, ()
        return _restore, (*self._recipe, self.communication_backend)

    def __repr__(self) -> str:
        return f"ChainerMN(communication_backend={self.communication_backend!r})"


def select_backend(comm_type: type, communication_backend: str) -> str:
    """`"mpi"` or `"nccl"`, by ChainerMN's rules."""
    if communication_backend not in ("mpi", "nccl", "auto"):
        raise ValueError(
            "`communication_backend` must be 'mpi', 'nccl' or 'auto': "
            f"got {communication_backend!r}."
        )
    is_nccl = any(cls.__name__ == "PureNcclCommunicator" for cls in comm_type.__mro__)
    if communication_backend == "nccl" and not is_nccl:
        raise ValueError(
            "`communication_backend='nccl'` needs ChainerMN's pure_nccl communicator: "
            f"got {comm_type.__qualname__}. Pass 'mpi' or 'auto', or create the communicator as "
            "chainermn.create_communicator('pure_nccl')."
        )
    if communication_backend == "auto":
        return "nccl" if is_nccl else "mpi"
    return communication_backend


@cache
def _find_comm(cls: type, world_ranks: tuple[int, ...] | None) -> Any:
    """A communicator of `cls` over these ranks of MPI.COMM_WORLD, None for all of them.

    Collective over those ranks when it is first called for them.
    """
    from multibn.communicators.mpi import find_comm

    return cls(mpi_comm=find_comm(world_ranks))


def _restore(cls: type, world_ranks: tuple[int, ...] | None, backend: str) -> ChainerMN:
    restored = ChainerMN.__new__(ChainerMN)
    restored._comm = None
    restored._recipe = cls, world_ranks
    restored.communication_backend = backend
    return restored
