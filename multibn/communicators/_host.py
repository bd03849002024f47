"""Copies of arrays in host memory, as NumPy arrays that MPI or gloo can move, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array, to_device

from multibn._arrays import array_namespace, device
from multibn._typing import Array


def to_host(x: Array, /) -> np.ndarray[Any, Any]:
    """`x` as a contiguous NumPy array, which may share its memory.

    16-bit types become float32: MPI has no half precision and NumPy no bfloat16.
    """
    if type(x) is np.ndarray:
        a = x
    elif is_torch_array(x):
        x = x.detach() if x.requires_grad else x
        x = x if x.is_cpu else x.cpu()
        if x.dtype.is_floating_point and x.dtype.itemsize < 4:
            x = x.float()
        a = x.numpy()
    elif is_cupy_array(x):
        a = x.get()
    else:
        a = np.asarray(x)
    if a.dtype == np.float16:
        a = a.astype(np.float32)
    # ascontiguousarray makes () into (1,)
    return a if a.flags.c_contiguous else np.ascontiguousarray(a).reshape(a.shape)


def from_host(a: np.ndarray[Any, Any], like: Array, /) -> Array:
    """`a` as an array of the library, dtype and device of `like`."""
    if isinstance(like, np.ndarray | np.generic):
        return a if a.dtype == like.dtype else a.astype(like.dtype)
    xp = array_namespace(like)
    if is_torch_array(like):
        t = xp.from_numpy(a)
        return t if t.dtype == like.dtype and like.is_cpu else t.to(like.device, like.dtype)
    return to_device(xp.asarray(a, dtype=like.dtype), device(like))


def through_host(
    x: Array, reduce: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], /
) -> Array:
    """Result of `reduce` on a host copy of `x`, as an array like `x`."""
    return from_host(reduce(to_host(x)), x)


def allgather_bytes(
    allreduce: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    rank: int,
    size: int,
    data: bytes,
    /,
) -> list[bytes]:
    """What each rank passed as `data`, cut to 512 bytes. Collective."""
    table = np.zeros((size, 512 // 8), dtype=np.int64)
    own = table[rank].view(np.uint8)
    data = data[: own.size]
    own[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return [row.tobytes().rstrip(b"\0") for row in allreduce(table)]
