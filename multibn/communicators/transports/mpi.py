"""Communicator over MPI, by mpi4py: buffers, never pickles.

mpi4py is imported, and MPI thereby initialised, at the first use of a communicator and not before.
"""

import ctypes
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array
from multibn.communicators.base import SingleProcess
from multibn.communicators.lines import LineCommunicator, Lines
from multibn.communicators.transports.mpi_lines import lines_of
from multibn.communicators.watch import check_timeout

if TYPE_CHECKING:
    from mpi4py.MPI import Comm


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
    >>> from multibn.communicators.transports.mpi import MPI
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
        self.timeout = check_timeout(timeout)
        self.world_ranks: tuple[int, ...] | None = None
        self._cuda_aware = cuda_aware
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

    def __reduce__(self) -> tuple[Any, ...]:
        if self.world_ranks is not None and len(self.world_ranks) == 1:
            return SingleProcess, ()
        return _restore, (self.world_ranks, self._cuda_aware, self.timeout)

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


def _restore(world_ranks: tuple[int, ...] | None, cuda_aware: bool | None, timeout: float) -> MPI:
    restored = MPI(cuda_aware=cuda_aware, timeout=timeout)
    restored.world_ranks = world_ranks
    return restored
