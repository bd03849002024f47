"""Arithmetic on activations and per-channel arrays: one file per kind of array.

The passes `local_moments`, `packed_moments`, `normalize`, `backward_sums` and `input_gradient` read
the whole activation; the steps `pack`, `unpack` and `move_averages` read per-channel arrays, the
message and the running statistics. `generic` says what each function does, and works for every
library of the array API standard. `host` (NumPy arrays and torch tensors in host memory), `cuda`
(torch tensors on a GPU) and `cupy` compute the same faster, if their compiler is installed. The
type and the place of the first array decide which file is used. All functions take the arguments
that `generic` names, and pass them on to `generic` where no loop is compiled for them. Only `cuda`
has the step `move_in_place`, which makes one launch of `move_averages` and the operations around
it. Nothing here knows of processes.
"""

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from multibn._arrays import array_namespace
from multibn._typing import Array
from multibn.kernels import generic
from multibn.kernels.generic import Unpacked
from multibn.kernels.generic import as_wide as as_wide
from multibn.kernels.generic import num_elements as num_elements


def local_moments(x: Array, /, *, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """As `generic.local_moments`."""
    return _select(x).local_moments(x, axis=axis)


def packed_moments(
    x: Array, weight: float, count: float, /, *, axis: tuple[int, ...], out: Array | None = None
) -> Array:
    """As `generic.packed_moments`; `out` is for arrays in host memory only."""
    kernels = _select(x)
    if out is None:
        return kernels.packed_moments(x, weight, count, axis=axis)
    return kernels.packed_moments(x, weight, count, axis=axis, out=out)


def normalize(
    x: Array,
    /,
    *statistics: Any,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
) -> Array:
    """As `generic.normalize`, then plus `residual`, an array like `x`, then ReLU if `relu`."""
    kernels = _select(x, *statistics)
    if residual is None and not relu:
        return kernels.normalize(x, *statistics, eps=eps, axis=axis)
    if hasattr(kernels, "normalize_add_relu"):
        return kernels.normalize_add_relu(x, *statistics, residual, relu, eps=eps, axis=axis)
    y = kernels.normalize(x, *statistics, eps=eps, axis=axis)
    if residual is not None:
        y += residual
    return array_namespace(y).clip(y, 0.0, None) if relu else y


def backward_sums(
    dy: Array, x: Array, mean: Array, var: Array, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """As `generic.backward_sums`."""
    kernels = _select(x, dy, mean, var)
    return kernels.backward_sums(dy, x, mean, var, eps=eps, axis=axis)


def input_gradient(
    dy: Array, x: Array, /, *statistics: Any, eps: float, axis: tuple[int, ...]
) -> Array:
    """As `generic.input_gradient`."""
    return _select(x, dy, *statistics).input_gradient(dy, x, *statistics, eps=eps, axis=axis)


def pack(
    mean: Array, meansqr: Array, weight: float, count: float, /, *, out: Array | None = None
) -> Array:
    """As `generic.pack`; `out` is for arrays in host memory only."""
    kernels = _select_steps(mean, meansqr)
    if out is None:
        return kernels.pack(mean, meansqr, weight, count)
    return kernels.pack(mean, meansqr, weight, count, out=out)


def unpack(summed: Array, /, *share: Any, like: Array | None = None) -> Unpacked:
    """As `generic.unpack`; `like` is read only if `summed` is an array of NumPy."""
    if like is None or type(summed) is not np.ndarray:
        return _select_steps(summed).unpack(summed, *share)
    return _select_steps(like).unpack(summed, *share, like=like)


def move_averages(*arguments: Any) -> tuple[Array, Array]:
    """As `generic.move_averages`."""
    return _select_steps(*arguments[:4]).move_averages(*arguments)


def move_in_place(*arguments: Any) -> bool:
    """As `cuda_steps.move_in_place`; False for arrays that are not on a GPU, or without Triton."""
    steps = _select_steps(arguments[0], arguments[1], *arguments[3:5])
    return hasattr(steps, "move_in_place") and steps.move_in_place(*arguments)


@contextmanager
def differentiable() -> Iterator[None]:
    """Context in which arrays of torch are computed by torch's own operations only.

    torch can differentiate these operations in any mode, and no compiled loop.
    """
    before, _local.differentiable = _local.differentiable, True
    try:
        yield
    finally:
        _local.differentiable = before


class _Local(threading.local):
    differentiable = False


_local = _Local()


def _select_steps(first: Array, *others: Any) -> Any:
    """The module with the steps for arrays like `first`."""
    return _native(_STEPS.get(_kind(first, others), "generic"))


def _select(x: Array, *others: Any) -> Any:
    """The module with the passes for arrays like `x`; `others` are the other arguments."""
    return _native(_kind(x, others))


_STEPS = {"host": "host_steps", "cuda": "cuda_steps"}


def _kind(x: Array, others: tuple[Any, ...]) -> str:
    if isinstance(x, np.ndarray):
        return "host"
    if is_torch_array(x):
        torch = sys.modules["torch"]
        if _local.differentiable or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return "generic"
        if torch.is_grad_enabled():
            # Autograd differentiates torch's own operations only, so no compiled loop.
            for a in (x, *others):
                if getattr(a, "requires_grad", False):
                    return "generic"
        return "host" if x.is_cpu else "cuda" if x.is_cuda else "generic"
    return "cupy" if is_cupy_array(x) else "generic"


@cache
def _native(name: str) -> Any:
    """The module `name`; `generic` if MULTIBN_KERNELS says so, or its compiler is missing."""
    if os.environ.get("MULTIBN_KERNELS") == "generic":
        return generic
    try:
        return importlib.import_module(f"multibn.kernels.{name}")
    except ImportError:
        return generic
