"""What compiled loops need of the arrays of NumPy and of torch in host memory: where they lie."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from multibn._typing import Array


class NumPy:
    """What the passes and steps ask of NumPy."""

    float64 = np.dtype(np.float64)

    def address(self, a: Array) -> int:
        """Where the elements of `a` lie; 0 if it is not memory alone that says what they are."""
        if type(a) is not np.ndarray or not a.size:
            return 0
        flags = a.flags
        if flags.carray:  # a third of the time of what any array takes
            return ctypes.addressof(ctypes.c_char.from_buffer(a.data))
        return int(a.__array_interface__["data"][0]) if flags.aligned else 0

    def is_dense(self, a: Array) -> bool:
        """Whether the elements lie side by side, in the order of the axes."""
        return bool(a.flags.c_contiguous)

    def strides(self, a: Array) -> tuple[int, ...]:
        """In elements; those of an aligned array are whole."""
        size = a.itemsize
        return tuple([s // size for s in a.strides])

    def cast(self, a: Array, dtype: Any) -> Array:
        """In dense memory if it is another dtype, in the order of the old one."""
        return a.astype(dtype, order="K", copy=False)

    def empty_like(self, a: Array, content: Array | None = None) -> Array:
        """Dense, in the order of `a`, and with the elements of `content`."""
        made = np.empty_like(a)
        if content is not None:
            made[...] = content
        return made

    def wide(self, a: Array) -> Array:
        """Dense, of float64."""
        return np.ascontiguousarray(a, dtype=np.float64)

    def new(self, n: int, shape: tuple[int, ...], dtype: Any) -> tuple[list[Array], list[int]]:
        """So many arrays of one shape, and their addresses."""
        made = np.empty((n, *shape), dtype)
        first, step = made.__array_interface__["data"][0], made.strides[0]
        return [made[i, ...] for i in range(n)], [first + i * step for i in range(n)]


class Torch:
    """What the passes and steps ask of torch, as above."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self.float64 = torch.float64

    def address(self, a: Array) -> int:
        if type(a) not in self._plain or not a.is_cpu or a.is_neg():
            return 0
        try:
            return int(a.data_ptr())
        except RuntimeError:  # torch.func transforms it
            return 0

    def is_dense(self, a: Array) -> bool:
        return bool(a.is_contiguous())

    def strides(self, a: Array) -> tuple[int, ...]:
        return tuple(a.stride())

    def cast(self, a: Array, dtype: Any) -> Array:
        return a.to(getattr(self._torch, dtype) if isinstance(dtype, str) else dtype)

    def empty_like(self, a: Array, content: Array | None = None) -> Array:
        made = self._torch.empty_like(a)
        return made if content is None else made.copy_(content)

    def wide(self, a: Array) -> Array:
        return a.double().contiguous()

    def new(self, n: int, shape: tuple[int, ...], dtype: Any) -> tuple[list[Array], list[int]]:
        made = [self._torch.empty(shape, dtype=dtype)]
        while len(made) < n:
            made.append(self._torch.empty_like(made[0]))  # faster than another by shape and dtype
        return made, [a.data_ptr() for a in made]


_NUMPY = NumPy()


def library(a: Array) -> Any:
    """Of an array that is one of the two libraries'."""
    return _NUMPY if isinstance(a, np.ndarray) else _torch()


def wide_addresses(of: Any, arrays: Sequence[Array]) -> list[int] | None:
    """Addresses of arrays that are dense and of float64; None if one of them is not."""
    addresses = []
    for a in arrays:
        address = of.address(a)
        if not address or a.dtype != of.float64 or not of.is_dense(a):
            return None
        addresses.append(address)
    return addresses


def vector(of: Any, n: int, out: np.ndarray[Any, Any] | None) -> tuple[Array, int]:
    """`out`, else a new array of `n` numbers of float64, and its address."""
    if out is not None:
        return out, _NUMPY.address(out)
    (array,), (address,) = of.new(1, (n,), of.float64)
    return array, address


class Parameters(NamedTuple):
    """Parameters or running statistics, all of one dtype."""

    dtype: str
    addresses: list[int]  # 0 for None
    kept: Sequence[Array | None]  # whose memory it is
    as_they_are: bool = True  # or copies in float64


def parameters_of(
    of: Any, shape: tuple[int, ...], arrays: Sequence[Array | None]
) -> Parameters | None:
    """None if one of them has another shape, or the loops cannot take it."""
    dtype = None
    as_they_are = True
    addresses = []
    for a in arrays:
        if a is None:
            addresses.append(0)
            continue
        address = of.address(a)
        if not address or a.shape != shape:
            return None
        dtype = a.dtype if dtype is None else dtype
        as_they_are = as_they_are and a.dtype == dtype and of.is_dense(a)
        addresses.append(address)
    name = _name(of.float64 if dtype is None else dtype)
    if as_they_are and name in ("float32", "float64"):
        return Parameters(name, addresses, arrays)
    kept = [None if a is None else of.wide(a) for a in arrays]
    addresses = [0 if a is None else of.address(a) for a in kept]
    return Parameters("float64", addresses, kept, as_they_are=False)


def scratch(n: int) -> tuple[Any, int]:
    """Memory of `n` zeros of float64, to be kept as long as it is used, and its address."""
    memory = (ctypes.c_double * n)()  # a sixth of the time that NumPy's takes
    return memory, ctypes.addressof(memory)


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _torch() -> Torch:
    return Torch(sys.modules["torch"])
