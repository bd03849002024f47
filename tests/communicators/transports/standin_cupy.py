"""The small part of CuPy that messages need, in host memory: for machines without a GPU.

The arrays say that they are on a GPU. The library's real numbers are tested where a GPU is.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from multibn import _arrays

STREAM = 13


class ndarray:
    """An array that only `get` brings to the host; the pointer to its memory is the memory."""

    device = contextlib.nullcontext()

    def __init__(self, a: Any) -> None:
        self._a = np.array(a)
        self.shape, self.dtype, self.size, self.ndim = a.shape, a.dtype, a.size, a.ndim
        self.data = SimpleNamespace(ptr=self._a)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("CuPy converts no array to NumPy's without `get`")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __getitem__(self, key: Any) -> "ndarray":
        return ndarray(self._a[key])

    def __setitem__(self, key: Any, value: "ndarray") -> None:
        self._a[key] = value._a

    def __add__(self, other: Any) -> "ndarray":
        return ndarray(self._a + getattr(other, "_a", other))

    def reshape(self, *shape: Any) -> "ndarray":
        return ndarray(self._a.reshape(*shape))

    def get(self) -> Any:
        return self._a.copy()


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """`cupy` in sys.modules, with arrays that array_api_compat knows as CuPy's."""
    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray, cupy.float64 = ndarray, np.float64
    cupy.asarray = lambda a, dtype=None: ndarray(getattr(a, "_a", a))
    cupy.concat = lambda arrays: ndarray(np.concatenate([a._a for a in arrays]))
    cupy.stack = lambda arrays: ndarray(np.stack([a._a for a in arrays]))
    cupy.abs, cupy.max = lambda a: ndarray(np.abs(a._a)), lambda a: ndarray(np.max(a._a))
    cupy.reshape = lambda a, shape: a.reshape(shape)
    cupy.ascontiguousarray = lambda a: ndarray(np.ascontiguousarray(a._a))
    cupy.from_dlpack = lambda x: ndarray(x.numpy())  # a tensor of torch's in host memory
    cupy.empty_like = lambda a: ndarray(np.empty_like(a._a))
    nccl: Any = types.ModuleType("cupy.cuda.nccl")
    nccl.NCCL_SUM = "sum"
    for kind in ("INT32", "INT64", "FLOAT16", "FLOAT32", "FLOAT64"):
        setattr(nccl, f"NCCL_{kind}", kind.lower())
    stream = SimpleNamespace(ptr=STREAM)
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.Device = nccl, contextlib.nullcontext
    cuda.get_current_stream = lambda: stream
    cupy.cuda = cuda
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}
    assert not modules.keys() & sys.modules.keys(), "CuPy is installed: test with that"
    sys.modules.update(modules)
    _arrays._namespaces[ndarray] = cupy
    try:
        yield cupy
    finally:
        del _arrays._namespaces[ndarray]
        for name in modules:
            del sys.modules[name]
