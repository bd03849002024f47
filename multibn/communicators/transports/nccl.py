"""Communicator over NCCL, by CuPy 13 or newer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array
from multibn.communicators.base import Communicator, Forwarding
from multibn.communicators.lines import HostArray, LineCommunicator, Lines
from multibn.communicators.lookup import as_communicator

_ID_SIZE = 128  # bytes of NCCL's unique id
_DTYPES = ("float16", "float32", "float64", "int32", "int64", "bfloat16")


class NCCL(LineCommunicator):
    """The processes of another communicator, each with a GPU of its own, over NCCL.

    CuPy arrays are reduced on their GPU in CuPy's current stream, torch tensors in torch's, where a
    CUDA graph can capture the sum; arrays in host memory go over `parent`. The GPU must be another
    one on each rank, and is that of the first array.

    While a CUDA graph is replayed, no Python runs, so that nobody looks at the messages of a layer:
    ranks in different places are not noticed. NaN or infinity on any rank is in the running
    statistics of all ranks afterwards, where the program can look for it.

    Parameters
    ----------
    parent
        Anything that `multibn.as_communicator` takes, over host memory: names the processes,
        carries the unique id that NCCL begins with and the first messages of layers, and is split
        by `split`.
    unique_id
        The id, `cupy.cuda.nccl.get_unique_id()` of one rank, where all ranks have it already: a
        tuple (CuPy 13) or bytes (CuPy 14). Default: rank 0 makes one, and the first use, which is
        collective in any case, exchanges it over `parent`.

    Raises
    ------
    ImportError
        If there is no CuPy, or one that finds no NCCL.
    ValueError
        If `unique_id` is not of 128 numbers.
    TypeError
        If `parent` is no communicator.

    Examples
    --------
    On a machine with a GPU and CuPy, in one process:

    >>> import cupy
    >>> from multibn.communicators.transports.nccl import NCCL
    >>> NCCL().allreduce(cupy.asarray([1.0, 10.0])).get()
    array([ 1., 10.])
    """

    def __init__(self, parent: Any = None, *, unique_id: Sequence[int] | None = None) -> None:
        self._parent = as_communicator(parent)
        if unique_id is not None and not _is_id(unique_id):
            raise ValueError(
                f"`unique_id` must be of {_ID_SIZE} numbers: got {unique_id!r}. Pass what "
                "cupy.cuda.nccl.get_unique_id() returned on one of the ranks."
            )
        _library()
        self._unique_id = unique_id
        self._comm: Any = None

    @property
    def comm(self) -> Any:
        """CuPy's NcclCommunicator, on the current GPU. Collective over all ranks at first."""
        if self._comm is None:
            nccl = _library()
            unique_id = self._unique_id
            if unique_id is None:
                unique_id = _made_on_rank_0(self._parent)
            unsigned = [n & 255 for n in unique_id]
            try:
                self._comm = nccl.NcclCommunicator(self.size, bytes(unsigned), self.rank)
            except TypeError:  # CuPy 13 takes C's signed characters
                signed = tuple(n - 256 if n > 127 else n for n in unsigned)
                self._comm = nccl.NcclCommunicator(self.size, signed, self.rank)
        return self._comm

    @property
    def rank(self) -> int:
        return self._parent.rank

    @property
    def size(self) -> int:
        return self._parent.size

    @property
    def timeout(self) -> float:  # type: ignore[override]
        """Seconds that the parent's collectives may take."""
        timeout: float = self._resolved().timeout
        return timeout

    @property
    def lines(self) -> Lines | None:
        parent = self._resolved()
        return parent.lines if isinstance(parent, LineCommunicator) else None

    def takes(self, x: Array, /) -> bool:
        return is_on_gpu(x)

    def allreduce_on_device(self, x: Array, /) -> Array:
        return allreduce(self._comm_for(x), x)

    def allreduce_in_place(self, x: Array, /) -> Array:
        return allreduce(self._comm_for(x), x, in_place=True)

    def allreduce_host(self, a: HostArray, /) -> HostArray:
        summed: HostArray = self._parent.allreduce(a)
        return summed

    def split(self, color: int, key: int = 0) -> "NCCL":
        return NCCL(self._parent.split(color, key))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._parent,)

    def __repr__(self) -> str:
        return f"NCCL({self._parent!r})"

    def _comm_for(self, x: Array) -> Any:
        if self._comm is None:
            with _gpu_of(x):
                return self.comm
        return self._comm

    def _resolved(self) -> Any:
        return self._parent.resolve() if isinstance(self._parent, Forwarding) else self._parent


def is_on_gpu(x: Array) -> bool:
    """Whether `allreduce` takes `x`."""
    return is_cupy_array(x) or (is_torch_array(x) and x.device.type == "cuda")


def allreduce(comm: Any, x: Array, /, *, in_place: bool = False) -> Array:
    """Sum `x`, a CuPy array or a torch tensor on a GPU, over the ranks of an NcclCommunicator.

    Collective. Returns a new array like `x`; with `in_place`, in the memory of `x` where that is
    contiguous. Nothing waits for the host.

    Raises
    ------
    TypeError
        If `x` is of another dtype than 16- to 64-bit floating-point and 32- and 64-bit integers.
    """
    nccl = _library()
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(
            f"an array that NCCL sums must be of dtype {', '.join(_DTYPES[:-1])} or "
            f"{_DTYPES[-1]}: got {dtype}. Convert it first."
        )
    kind = getattr(nccl, f"NCCL_{dtype.upper()}")
    if is_torch_array(x):
        import torch

        # Not by DLPack and CuPy's stream: a CUDA graph of torch's captures torch's stream only.
        with _gpu_of(x):
            x = x.detach().contiguous()
            summed = x if in_place else torch.empty_like(x)
            stream = torch.cuda.current_stream(x.device).cuda_stream
            sent, received = x.data_ptr(), summed.data_ptr()
            comm.allReduce(sent, received, x.numel(), kind, nccl.NCCL_SUM, stream)
        return summed
    import cupy

    with _gpu_of(x):
        x = cupy.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray makes () into (1,)
        out = x if in_place else cupy.empty_like(x)
        stream = cupy.cuda.get_current_stream()
        comm.allReduce(x.data.ptr, out.data.ptr, x.size, kind, nccl.NCCL_SUM, stream.ptr)
    return out


def _gpu_of(x: Array) -> Any:
    """A context in which the GPU of `x` is current."""
    if is_torch_array(x):
        import torch

        return torch.cuda.device_of(x)
    return x.device


def _library() -> Any:
    """CuPy's binding of NCCL."""
    try:
        from cupy.cuda import nccl
    except ImportError as e:
        raise ImportError(
            "NCCL needs CuPy: not found here. Install it for your version of CUDA, "
            "pip install 'multibn[cupy12]' or 'multibn[cupy13]'."
        ) from e
    if not nccl.available:
        raise ImportError(
            "NCCL is not found by CuPy. Install it, for CUDA 12 as pip install nvidia-nccl-cu12."
        )
    return nccl


def _is_id(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == _ID_SIZE
        and all(isinstance(n, int) for n in value)
    )


def _made_on_rank_0(parent: Communicator) -> Sequence[int]:
    """A new unique id, on all ranks of `parent`. Collective over them."""
    shared = np.zeros(_ID_SIZE, dtype=np.int64)
    if parent.rank == 0:
        shared[:] = list(_library().get_unique_id())
    numbers: list[int] = parent.allreduce(shared).tolist()
    return numbers


def _restore(parent: Communicator) -> NCCL:
    restored = NCCL.__new__(NCCL)  # without CuPy until it communicates
    restored._parent, restored._unique_id, restored._comm = parent, None, None
    return restored
