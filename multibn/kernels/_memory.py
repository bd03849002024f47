"""Addresses of NumPy arrays and of torch tensors in host memory, for the compiled loops."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from multibn import message
from multibn._typing import Array


class NumPy:
    """Addresses and copies of NumPy arrays."""

    float64 = np.dtype(np.float64)

    def address(self, a: Array) -> int:
        """Address of the first element; 0 if `a` is empty, a subclass or misaligned."""
        if type(a) is not np.ndarray or not a.size:
            return 0
        flags = a.flags
        if flags.carray:  # in a third of the time of __array_interface__
            return ctypes.addressof(ctypes.c_char.from_buffer(a.data))
        return int(a.__array_interface__["data"][0]) if flags.aligned else 0

    def dense_addresses(self, arrays: Sequence[Array | None], dtype: Any) -> list[int] | None:
        """Addresses of `arrays`, 0 for None; None unless all are dense and of `dtype`."""
        addresses = []
        for a in arrays:
            address = 0 if a is None else self.address(a)
            if a is not None and (not address or a.dtype != dtype or not a.flags.c_contiguous):
                return None
            addresses.append(address)
        return addresses

    def locate(self, a: Array) -> tuple[int, tuple[int, ...]]:
        """Address and strides in elements; an aligned array's strides are whole elements."""
        size = a.itemsize
        return self.address(a), tuple([s // size for s in a.strides])

    def cast(self, a: Array, dtype: Any) -> Array:
        """`a` in `dtype`: `a` itself, or a dense copy in the memory order of `a`."""
        return a.astype(dtype, order="K", copy=False)

    def dense_copy(self, a: Array, like: Array) -> Array:
        """A dense copy of `a` in the memory order of `like`."""
        array = np.empty_like(like)
        array[...] = a
        return array

    def new_like(self, a: Array) -> tuple[Array, int]:
        """An uninitialised dense array in the memory order of `a`, and its address."""
        array = np.empty_like(a)
        return array, self.address(array)

    def wide(self, a: Array) -> Array:
        """`a` as a dense float64 array."""
        return np.ascontiguousarray(a, dtype=np.float64)

    def new(self, n: int, shape: tuple[int, ...], dtype: Any) -> tuple[list[Array], list[int]]:
        """`n` uninitialised arrays of one shape, and their addresses."""
        arrays = np.empty((n, *shape), dtype)
        first, step = arrays.__array_interface__["data"][0], arrays.strides[0]
        return [arrays[i, ...] for i in range(n)], [first + i * step for i in range(n)]


class Torch:
    """The methods of `NumPy` for torch tensors."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self.float64 = torch.float64

    def address(self, a: Array) -> int:
        """Address of the first element; 0 if `a` is empty, lazily negated or a subclass."""
        return self.locate(a)[0]

    def dense_addresses(self, arrays: Sequence[Array | None], dtype: Any) -> list[int] | None:
        addresses = []
        try:
            for a in arrays:
                if a is None:
                    addresses.append(0)
                    continue
                if type(a) not in self._plain or a.dtype != dtype or not a.is_cpu or a.is_neg():
                    return None
                address = a.data_ptr()
                if not address or not a.is_contiguous():
                    return None
                addresses.append(address)
        except RuntimeError:  # a tensor that torch.func transforms has no address
            return None
        return addresses

    def locate(self, a: Array) -> tuple[int, tuple[int, ...]]:
        if type(a) not in self._plain or not a.is_cpu or a.is_neg():
            return 0, ()
        try:
            return int(a.data_ptr()), a.stride()
        except RuntimeError:  # as above
            return 0, ()

    def cast(self, a: Array, dtype: Any) -> Array:
        return a.to(getattr(self._torch, dtype) if isinstance(dtype, str) else dtype)

    def dense_copy(self, a: Array, like: Array) -> Array:
        return self._torch.empty_like(like).copy_(a)

    def new_like(self, a: Array) -> tuple[Array, int]:
        tensor = self._torch.empty_like(a)
        return tensor, tensor.data_ptr()

    def wide(self, a: Array) -> Array:
        return a.double().contiguous()

    def new(self, n: int, shape: tuple[int, ...], dtype: Any) -> tuple[list[Array], list[int]]:
        tensors = [self._torch.empty(shape, dtype=dtype)]
        addresses = [tensors[0].data_ptr()]
        while len(tensors) < n:
            tensors.append(self._torch.empty_like(tensors[0]))  # faster than by shape and dtype
            addresses.append(tensors[-1].data_ptr())
        return tensors, addresses


_NUMPY = NumPy()


def library_of(a: Array) -> Any:
    """The `NumPy` or `Torch` object for an array in host memory."""
    return _NUMPY if isinstance(a, np.ndarray) else _torch()


def payload(library: Any, C: int, out: Array | None) -> tuple[Array, int]:
    """`out`, or a new array for the forward payload of C channels; and its address."""
    if out is not None:
        return out, _NUMPY.address(out)
    (array,), (address,) = library.new(1, (message.forward_payload(C),), library.float64)
    return array, address


class Parameters(NamedTuple):
    """Parameters or running statistics, all of one dtype."""

    dtype: str
    addresses: list[int]  # 0 for None
    arrays: Sequence[Array | None]  # referred to, so that their memory is not freed
    are_copies: bool = False  # whether the arrays are float64 copies


def parameters_of(
    library: Any, shape: tuple[int, ...], arrays: Sequence[Array | None]
) -> Parameters | None:
    """`arrays` for the loops; None if one has another shape, or no address."""
    dtype = None
    for a in arrays:
        if a is not None:
            if a.shape != shape:
                return None
            dtype = dtype or a.dtype
    name = _name(dtype or library.float64)
    if name in ("float32", "float64"):
        addresses = library.dense_addresses(arrays, dtype)
        if addresses is not None:
            return Parameters(name, addresses, arrays)
    if not all(a is None or library.address(a) for a in arrays):
        return None
    copies = [None if a is None else library.wide(a) for a in arrays]
    addresses = [0 if a is None else library.address(a) for a in copies]
    return Parameters("float64", addresses, copies, are_copies=True)


def scratch(n: int) -> tuple[Any, int]:
    """`n` float64 zeros and their address; the caller must hold the memory while it is used."""
    memory = (ctypes.c_double * n)()  # in a sixth of the time of numpy.zeros
    return memory, ctypes.addressof(memory)


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _torch() -> Torch:
    return Torch(sys.modules["torch"])
