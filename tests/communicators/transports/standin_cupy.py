"""The small part of CuPy that messages need, in host memory: for machines without a GPU.

The arrays say that they are on a GPU. The library's real numbers are tested where a GPU is.
"""

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from multibn import _arrays


class ndarray:
    """An array that only `get` brings to the host."""

    def __init__(self, a: Any) -> None:
        self._a = np.array(a)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("CuPy converts no array to NumPy's without `get`")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "dtype", "size", "ndim"):
            raise AttributeError(name)
        return getattr(self._a, name)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._a.ctypes.data)

    @property
    def device(self) -> "Device":
        return Device()

    def __getitem__(self, key: Any) -> "ndarray":
        return ndarray(self._a[key])

    def __add__(self, other: Any) -> "ndarray":
        return ndarray(self._a + getattr(other, "_a", other))

    def reshape(self, *shape: Any) -> "ndarray":
        return ndarray(self._a.reshape(*shape))

    def get(self, out: Any = None, blocking: bool = True) -> Any:
        if out is None:
            return self._a.copy()
        out[...] = self._a
        return out


class Device:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device)

    def __hash__(self) -> int:
        return 0


# By NCCL's numbers.
_KINDS = {"INT32": 2, "INT64": 4, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8}
_DTYPES: dict[int, Any] = {number: kind.lower() for kind, number in _KINDS.items()}
STREAM = 13


class NcclCommunicator:
    """Sums memory over ranks that are threads; `exchange` sums an array over them."""

    def __init__(
        self, size: int, unique_id: Any, rank: int, exchange: Callable[[Any], Any] = np.copy
    ) -> None:
        self._exchange = exchange
        self.streams: list[int] = []

    def allReduce(  # noqa: N802 (CuPy's name)
        self, sent: int, received: int, n: int, kind: int, operation: int, stream: int
    ) -> None:
        dtype = np.dtype(_DTYPES[kind])
        source, target = (
            np.frombuffer((ctypes.c_byte * (n * dtype.itemsize)).from_address(p), dtype)
            for p in (sent, received)
        )
        target[:] = self._exchange(source)
        self.streams.append(stream)


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """`cupy` and `cupyx` in sys.modules, with arrays that array_api_compat knows as CuPy's."""
    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray, cupy.float64 = ndarray, np.float64
    cupy.asarray = lambda a, dtype=None: ndarray(getattr(a, "_a", a))
    cupy.concat = lambda arrays: ndarray(np.concatenate([a._a for a in arrays]))
    cupy.ascontiguousarray = lambda a: ndarray(np.ascontiguousarray(a._a))
    cupy.from_dlpack = lambda x: ndarray(x.numpy())  # a tensor of torch's in host memory
    cupy.empty_like = lambda a: ndarray(np.empty_like(a._a))
    nccl: Any = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NcclCommunicator = True, NcclCommunicator
    nccl.get_unique_id = lambda: bytes(range(128))
    nccl.get_version = lambda: 23203
    for kind, number in {**_KINDS, "SUM": 0}.items():
        setattr(nccl, f"NCCL_{kind}", number)
    stream = SimpleNamespace(ptr=STREAM, is_capturing=lambda: False, synchronize=lambda: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.Device = nccl, Device
    cuda.runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    cuda.Event, cuda.get_current_stream = lambda: event, lambda: stream
    cupy.cuda = cuda
    cupyx: Any = types.ModuleType("cupyx")
    cupyx.empty_pinned = np.empty
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl, "cupyx": cupyx}
    assert not modules.keys() & sys.modules.keys(), "CuPy is installed: test with that"
    sys.modules.update(modules)
    _arrays._namespaces[ndarray] = cupy
    try:
        yield cupy
    finally:
        del _arrays._namespaces[ndarray]
        for name in modules:
            del sys.modules[name]
