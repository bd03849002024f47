"""Addresses of NumPy arrays and of torch tensors in host memory, for the C core."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias

import numpy as np

from multibn._typing import Array
from multibn.kernels import _core

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}  # their numbers in _core.c

# Arrays, or None; their dtype and shape, and their strides, or None for contiguous memory.
Group: TypeAlias = tuple[Sequence[Array | None], Any, tuple[int, ...], tuple[int, ...] | None]


# `addressof(at_start(a))` is the address of NumPy's contiguous memory that one may write to, in a
# fifth of the time of __array_interface__.
addressof: Any = ctypes.addressof
at_start: Any = ctypes.c_char.from_buffer


class NumPy:
    """Addresses and copies of NumPy arrays."""

    float64, int64, bool = np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.bool_)
    strides = staticmethod(attrgetter("strides"))
    empty_like = staticmethod(np.empty_like)

    def address(self, a: Array) -> int:
        """Address of the first element; 0 if `a` is misaligned."""
        flags = a.flags
        if flags.carray and a.size:  # in a third of the time of __array_interface__
            return addressof(at_start(a))
        return int(a.__array_interface__["data"][0]) if flags.aligned else 0

    def locate(self, *groups: Group) -> list[int] | None:
        """Addresses of all arrays, 0 for None; None if an array is not as its group says, is a
        subclass's, or has no address that can be used.
        """
        addresses = []
        for arrays, dtype, shape, strides in groups:
            for a in arrays:
                if a is None:
                    addresses.append(0)
                    continue
                if type(a) is not np.ndarray or a.dtype != dtype or a.shape != shape:
                    return None
                address = self.address(a)
                laid_out = a.flags.c_contiguous if strides is None else a.strides == strides
                if not address or not laid_out:
                    return None
                addresses.append(address)
        return addresses

    def dense_copy(self, a: Array, like: Array) -> Array:
        """A dense copy of `a` in the memory order of `like`."""
        array = np.empty_like(like)
        array[...] = a
        return array

    def flat(self, a: Array, order: tuple[int, ...]) -> Array:
        """`a` as a dense vector, its axes in this order."""
        return np.ascontiguousarray(a.transpose(order).reshape(-1))

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
    """The same for torch tensors."""

    strides = staticmethod(methodcaller("stride"))
    address = staticmethod(methodcaller("data_ptr"))

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.plain = (torch.Tensor, torch.nn.Parameter)
        self.float64, self.int64, self.bool = torch.float64, torch.int64, torch.bool
        self.empty_like = torch.empty_like
        self._templates: dict[Any, Array] = {}  # as many as there are numbers of channels
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if exchange is not None:  # torch 2.10 and later: the same, in a third of the time
            names = {"float16": 0x210, "float32": 0x220, "float64": 0x240, "bfloat16": 0x410}
            names |= {"int64": 0x040, "bool": 0x608}  # DLPack's codes and bits
            numbers = {getattr(torch, name): number for name, number in names.items()}
            locate: Any = partial(_core.locate, (exchange, self.plain, numbers, "is_neg"))
            self.locate = locate  # type: ignore[method-assign]

    def locate(self, *groups: Group) -> list[int] | None:
        addresses = []
        plain = self.plain
        try:
            for arrays, dtype, shape, strides in groups:
                for a in arrays:
                    if a is None:
                        addresses.append(0)
                        continue
                    if type(a) not in plain or a.dtype != dtype or a.shape != shape:
                        return None
                    # A tensor may be lazily negated.
                    if not a.is_cpu or a.is_neg():
                        return None
                    if not a.is_contiguous() if strides is None else a.stride() != strides:
                        return None
                    address = a.data_ptr()
                    if not address:  # lazy zeros, as torch has them for gradients
                        return None
                    addresses.append(address)
        except RuntimeError:  # a tensor that torch.func transforms has no address
            return None
        return addresses

    def dense_copy(self, a: Array, like: Array) -> Array:
        return self._torch.empty_like(like).copy_(a)

    def flat(self, a: Array, order: tuple[int, ...]) -> Array:
        return a.permute(order).reshape(-1).contiguous()

    def wide(self, a: Array) -> Array:
        return a.double().contiguous()

    def cast(self, a: Array, dtype: Any) -> Array:
        return a.to(dtype)

    def new(self, dtype: Any, *shapes: tuple[int, ...]) -> tuple[list[Array], list[int]]:
        tensors, addresses = [], []
        for shape in shapes:
            like = self._templates.get((dtype, shape))
            if like is None:
                # The default device may be a GPU.
                like = self._torch.empty(shape, dtype=dtype, device="cpu")
                self._templates[dtype, shape] = like
            tensor = self.empty_like(like)  # in half of the time of torch.empty
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        return tensors, addresses

    def changed(self, *arrays: Array | None) -> None:
        written = [a for a in arrays if a is not None and not a.is_inference()]
        self._torch.autograd.graph.increment_version(written)


class _Libraries(dict[type, Any]):
    """The `NumPy` or `Torch` object for a type of arrays, or None."""

    def __missing__(self, kind: type) -> Any:
        if "torch" not in sys.modules:
            return None
        torch = Torch(sys.modules["torch"])
        self.update(dict.fromkeys(torch.plain, torch))
        return self.get(kind)


LIBRARIES = _Libraries({np.ndarray: NumPy()})


def scratch(n: int) -> tuple[Any, int]:
    """`n` float64 zeros and their address; the caller must hold the memory while it is used."""
    memory = (ctypes.c_double * n)()  # in a sixth of the time of numpy.zeros
    return memory, ctypes.addressof(memory)


@cache
def code_of(dtype: Any) -> int | None:
    """The number of a dtype of NumPy or torch in _core.c; None if the loops do not know it."""
    return DTYPES.get(str(dtype).removeprefix("torch."))
