"""Addresses of NumPy arrays and of torch tensors in host memory, for the C core."""

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np

from multibn._typing import Array

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}  # their numbers in _core.c


class NumPy:
    """Addresses and copies of NumPy arrays."""

    float64, int64 = np.dtype(np.float64), np.dtype(np.int64)

    def address(self, a: Array) -> int:
        """Address of the first element; 0 if `a` is empty, a subclass or misaligned."""
        if type(a) is not np.ndarray or not a.size:
            return 0
        flags = a.flags
        if flags.carray:  # in a third of the time of __array_interface__
            return ctypes.addressof(ctypes.c_char.from_buffer(a.data))
        return int(a.__array_interface__["data"][0]) if flags.aligned else 0

    def locate(self, *arrays: Array) -> tuple[list[int], list[tuple[int, ...]]] | None:
        """Addresses, and strides in elements, of arrays of one dtype and shape; None if not all
        have an address, or they differ.
        """
        x = arrays[0]
        addresses, strides = [], []
        for a in arrays:
            address, size = self.address(a), a.itemsize
            if not address or a.dtype != x.dtype or a.shape != x.shape:
                return None
            addresses.append(address)
            # An aligned array's strides are whole elements.
            strides.append(tuple([s // size for s in a.strides]))
        return addresses, strides

    def dense(
        self, shape: tuple[int, ...], dtype: Any, *arrays: Array | None, written: bool = False
    ) -> list[int] | None:
        """Addresses of `arrays`, 0 for None; None unless all are dense, of `shape` and `dtype`, and
        may be written to if they are to be.
        """
        addresses = []
        for a in arrays:
            address = 0 if a is None else self.address(a)
            if a is not None and (
                not address
                or a.shape != shape
                or a.dtype != dtype
                or not (a.flags.carray if written else a.flags.c_contiguous)
            ):
                return None
            addresses.append(address)
        return addresses

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

    def cast(self, a: Array, dtype: Any) -> Array:
        """`a` in `dtype`."""
        return a.astype(dtype, copy=False)

    def new(self, dtype: Any, *shapes: tuple[int, ...]) -> tuple[list[Array], list[int]]:
        """Uninitialised arrays of these shapes, and their addresses."""
        arrays = [np.empty(shape, dtype) for shape in shapes]
        return arrays, [self.address(a) for a in arrays]

    def changed(self, *arrays: Array | None) -> None:
        """Arrays were written to by their addresses."""


class Torch:
    """The methods of `NumPy` for torch tensors."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self.float64, self.int64 = torch.float64, torch.int64

    def locate(self, *arrays: Array) -> tuple[list[int], list[tuple[int, ...]]] | None:
        x = arrays[0]
        addresses, strides = [], []
        try:
            for a in arrays:
                # A tensor may be lazily negated.
                if type(a) not in self._plain or not a.is_cpu or a.is_neg():
                    return None
                address = a.data_ptr()
                if not address or a.dtype != x.dtype or a.shape != x.shape:
                    return None
                addresses.append(address)
                strides.append(a.stride())
        except RuntimeError:  # a tensor that torch.func transforms has no address
            return None
        return addresses, strides

    def dense(
        self, shape: tuple[int, ...], dtype: Any, *arrays: Array | None, written: bool = False
    ) -> list[int] | None:
        addresses = []
        try:
            for a in arrays:
                if a is None:
                    addresses.append(0)
                    continue
                if type(a) not in self._plain or a.dtype != dtype or a.shape != shape:
                    return None
                if not a.is_cpu or a.is_neg() or not a.is_contiguous():
                    return None
                address = a.data_ptr()
                if not address:
                    return None
                addresses.append(address)
        except RuntimeError:  # as above
            return None
        return addresses

    def dense_copy(self, a: Array, like: Array) -> Array:
        return self._torch.empty_like(like).copy_(a)

    def new_like(self, a: Array) -> tuple[Array, int]:
        tensor = self._torch.empty_like(a)
        return tensor, tensor.data_ptr()

    def wide(self, a: Array) -> Array:
        return a.double().contiguous()

    def cast(self, a: Array, dtype: Any) -> Array:
        return a.to(dtype)

    def new(self, dtype: Any, *shapes: tuple[int, ...]) -> tuple[list[Array], list[int]]:
        tensors, addresses = [], []
        for shape in shapes:
            tensor = self._torch.empty(shape, dtype=dtype)
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        return tensors, addresses

    def changed(self, *arrays: Array | None) -> None:
        for a in arrays:
            if a is not None and not a.is_inference():
                self._torch.autograd.graph.increment_version(a)


_NUMPY = NumPy()


def library_of(a: Array) -> Any:
    """The `NumPy` or `Torch` object for an array in host memory."""
    return _NUMPY if isinstance(a, np.ndarray) else _torch()


def scratch(n: int) -> tuple[Any, int]:
    """`n` float64 zeros and their address; the caller must hold the memory while it is used."""
    memory = (ctypes.c_double * n)()  # in a sixth of the time of numpy.zeros
    return memory, ctypes.addressof(memory)


@cache
def code_of(dtype: Any) -> int | None:
    """The number of a dtype of NumPy or torch in _core.c; None if the loops do not know it."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


@cache
def _torch() -> Torch:
    return Torch(sys.modules["torch"])
