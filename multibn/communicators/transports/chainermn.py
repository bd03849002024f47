"""Communicator over a ChainerMN communicator; CuPy arrays may travel over NCCL."""

from typing import Any, Literal

from array_api_compat import is_cupy_array

from multibn._typing import Array, check_choice
from multibn.communicators.transports.mpi import MPI


class ChainerMN(MPI):
    """The processes of a ChainerMN communicator.

    Arrays in host memory travel as in `MPI(comm.mpi_comm)`, with the same checks and deadlines.
    CuPy arrays on a GPU travel over NCCL, or through host memory. ChainerMN's `allreduce` is never
    called. Unpickling returns an `MPI` communicator of the same processes.

    Parameters
    ----------
    comm
        Any communicator of `chainermn.create_communicator`, or one derived from its classes.
    communication_backend
        `"mpi"`, `"nccl"` or `"auto"`: NCCL for a pure_nccl communicator, MPI for any other.

    Raises
    ------
    ValueError
        If `communication_backend` is none of the three, or is `"nccl"` and `comm` is not pure_nccl.

    Examples
    --------
    On each of two ranks, under `mpiexec -n 2 python -m mpi4py`:

    >>> import multibn.chainer  # makes Chainer importable
    >>> import chainermn, numpy as np
    >>> from multibn.communicators.transports.chainermn import ChainerMN
    >>> communicator = ChainerMN(chainermn.create_communicator("naive"))
    >>> communicator.allreduce(np.asarray([1.0, 10.0]))
    array([ 2., 20.])
    """

    def __init__(self, comm: Any, communication_backend: str = "auto") -> None:
        super().__init__(comm.mpi_comm)
        self.comm = comm
        self.communication_backend = select_backend(type(comm), communication_backend)

    @property
    def native(self) -> Any:
        """ChainerMN's communicator."""
        return self.comm

    def reduces_on_device(self, x: Array, /) -> bool:
        return self.communication_backend == "nccl" and is_cupy_array(x)

    def allreduce_on_device(self, x: Array, /) -> Array:
        self.comm._init_comms()  # creates ChainerMN's NCCL communicator if necessary
        return sum_by_nccl(self.comm.nccl_comm, x)

    def split(self, color: int, key: int = 0) -> "ChainerMN":
        return ChainerMN(self.comm.split(color, key), self.communication_backend)

    def __repr__(self) -> str:
        return f"ChainerMN(communication_backend={self.communication_backend!r})"


def select_backend(comm_type: type, communication_backend: str) -> str:
    """Return `"mpi"` or `"nccl"`, by ChainerMN's rules."""
    check_choice("communication_backend", communication_backend, Literal["mpi", "nccl", "auto"])
    is_nccl = any(cls.__name__ == "PureNcclCommunicator" for cls in comm_type.__mro__)
    if communication_backend == "nccl" and not is_nccl:
        raise ValueError(
            "`communication_backend='nccl'` needs ChainerMN's pure_nccl communicator: "
            f"got {comm_type.__qualname__}. Pass 'mpi' or 'auto', or create the communicator as "
            "chainermn.create_communicator('pure_nccl')."
        )
    automatic = "nccl" if is_nccl else "mpi"
    return automatic if communication_backend == "auto" else communication_backend


def sum_by_nccl(comm: Any, x: Array, /) -> Array:
    """Sum the CuPy array `x` over the ranks of a CuPy NcclCommunicator.

    Collective. Returns a new array like `x`, without waiting for the GPU.
    """
    import cupy
    from cupy.cuda import nccl

    with x.device:
        x = cupy.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray turns shape () into (1,)
        out = cupy.empty_like(x)
        kind = getattr(nccl, f"NCCL_{str(x.dtype).upper()}")
        stream = cupy.cuda.get_current_stream()
        comm.allReduce(x.data.ptr, out.data.ptr, x.size, kind, nccl.NCCL_SUM, stream.ptr)
    return out
