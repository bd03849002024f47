"""Arithmetic on activations, and on per-channel arrays between: one file per kind of array.

The passes `local_moments`, `packed_moments`, `normalize`, `backward_sums` and `input_gradient`
touch the whole activation; the steps `pack`, `unpack` and `move_averages` only per-channel arrays,
beside the message and the running statistics. `generic` is the reference, works for every library
of the array API standard, and says what each of them does.
`host` (NumPy arrays and torch tensors in host memory), `cuda` (torch tensors on a GPU) and `cupy`
compute the same faster, where the library that compiles them is installed. The array that comes in
says which one is used. Nothing here knows of processes.
"""

import importlib
import os
import sys
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
    moments: tuple[Array, Array] = _select(x).local_moments(x, axis=axis)
    return moments


def packed_moments(
    x: Array,
    weight: float,
    count: float,
    /,
    *,
    axis: tuple[int, ...],
    out: np.ndarray[Any, Any] | None = None,
) -> Array:
    """As `generic.packed_moments`. `out` is for arrays in host memory only."""
    kernels = _select(x)
    if out is None:
        return kernels.packed_moments(x, weight, count, axis=axis)
    return kernels.packed_moments(x, weight, count, axis=axis, out=out)


def normalize(
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
) -> Array:
    """As `generic.normalize`, then plus `residual`, an array like `x`, then ReLU."""
    kernels = _select(x, mean, var, weight, bias)
    if residual is None and not relu:
        return kernels.normalize(x, mean, var, weight, bias, eps=eps, axis=axis)
    if hasattr(kernels, "normalize_add_relu"):
        return kernels.normalize_add_relu(
            x, mean, var, weight, bias, residual, relu, eps=eps, axis=axis
        )
    y = kernels.normalize(x, mean, var, weight, bias, eps=eps, axis=axis)
    if residual is not None:
        y += residual
    return array_namespace(y).clip(y, 0.0, None) if relu else y


def backward_sums(
    dy: Array, x: Array, mean: Array, var: Array, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """As `generic.backward_sums`."""
    kernels = _select(x, dy, mean, var)
    sums: tuple[Array, Array] = kernels.backward_sums(dy, x, mean, var, eps=eps, axis=axis)
    return sums


def input_gradient(
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    element_weight: Array,
    sum_dy: Array,
    sum_dy_xhat: Array,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
) -> Array:
    """As `generic.input_gradient`."""
    statistics = mean, var, weight, element_weight, sum_dy, sum_dy_xhat
    return _select(x, dy, *statistics).input_gradient(dy, x, *statistics, eps=eps, axis=axis)


def pack(
    mean: Array,
    meansqr: Array,
    weight: float,
    count: float,
    /,
    *,
    out: np.ndarray[Any, Any] | None = None,
) -> Array:
    """As `generic.pack`. `out` is for arrays in host memory only."""
    kernels = _select_steps(mean, meansqr)
    if out is None:
        return kernels.pack(mean, meansqr, weight, count)
    return kernels.pack(mean, meansqr, weight, count, out=out)


def unpack(
    summed: Array,
    shape: tuple[int, ...],
    weight: float,
    count: float,
    /,
    *,
    like: Array | None = None,
) -> Unpacked:
    """As `generic.unpack`; `like` matters where `summed` is memory of the transport."""
    if like is not None and type(summed) is np.ndarray:
        unpacked: Unpacked = _select_steps(like).unpack(summed, shape, weight, count, like=like)
    else:
        unpacked = _select_steps(summed).unpack(summed, shape, weight, count)
    return unpacked


def move_averages(
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    momentum: float | Array,
    factor: float | Array,
    /,
) -> tuple[Array, Array]:
    """As `generic.move_averages`."""
    moved: tuple[Array, Array] = _select_steps(running_mean, running_var, mean, var).move_averages(
        running_mean, running_var, mean, var, momentum, factor
    )
    return moved


def _select_steps(first: Array, *others: Any) -> Any:
    """The file with steps for arrays like `first`."""
    return _native(_STEPS.get(_kind(first, others), "generic"))


def _select(x: Array, *others: Any) -> Any:
    """The file for arrays like `x`; `others` go into the pass too, numbers and None included."""
    return _native(_kind(x, others))


_STEPS = {"host": "host_steps", "cuda": "cuda_steps"}


def _kind(x: Array, others: tuple[Any, ...]) -> str:
    if isinstance(x, np.ndarray):
        return "host"
    if is_torch_array(x):
        torch = sys.modules["torch"]
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            return "generic"
        if torch.is_grad_enabled():
            # Autograd can differentiate torch's own operations only.
            for a in (x, *others):
                if getattr(a, "requires_grad", False):
                    return "generic"
        return "host" if x.is_cpu else "cuda" if x.is_cuda else "generic"
    return "cupy" if is_cupy_array(x) else "generic"


@cache
def _native(name: str) -> Any:
    """The module; `generic` where that is asked for, or its compiler is not installed."""
    if os.environ.get("MULTIBN_KERNELS") == "generic":
        return generic
    try:
        return importlib.import_module(f"multibn.kernels.{name}")
    except ImportError:
        return generic
