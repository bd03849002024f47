"""Arithmetic on activations, and on per-channel arrays between: one file per kind of array.

The passes `local_moments`, `normalize`, `backward_sums` and `input_gradient` touch the whole
activation; they see it and per-channel coefficients. The steps `pack`, `unpack`, `affine`,
`over_std`, `gradient_coefficients` and `move_averages` turn the ones into the others. `generic` is
the reference, works for every library of the array API standard, and says what each of them does.
`host` (NumPy arrays and torch tensors in host memory), `cuda` (torch tensors on a GPU) and `cupy`
compute the same faster, where the library that compiles them is installed. The array that comes in
says which one is used. Nothing here knows of processes.
"""

import importlib
import os
import sys
from functools import cache
from typing import Any

from array_api_compat import is_cupy_array, is_numpy_array, is_torch_array

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


def normalize(
    x: Array,
    mean: Array,
    scale: Array,
    shift: Array,
    /,
    *,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
) -> Array:
    """As `generic.normalize`, then plus `residual`, an array like `x`, then ReLU."""
    kernels = _select(x, mean, scale, shift)
    if residual is None and not relu:
        return kernels.normalize(x, mean, scale, shift, axis=axis)
    if hasattr(kernels, "normalize_add_relu"):
        return kernels.normalize_add_relu(x, mean, scale, shift, residual, relu, axis=axis)
    y = kernels.normalize(x, mean, scale, shift, axis=axis)
    if residual is not None:
        y += residual
    return array_namespace(y).clip(y, 0.0, None) if relu else y


def backward_sums(
    dy: Array, x: Array, mean: Array, /, *, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """As `generic.backward_sums`."""
    sums: tuple[Array, Array] = _select(x, dy, mean).backward_sums(dy, x, mean, axis=axis)
    return sums


def input_gradient(
    dy: Array,
    x: Array,
    mean: Array,
    dy_scale: Array,
    x_scale: Array,
    shift: Array,
    /,
    *,
    axis: tuple[int, ...],
) -> Array:
    """As `generic.input_gradient`."""
    kernels = _select(x, dy, mean, dy_scale, x_scale, shift)
    return kernels.input_gradient(dy, x, mean, dy_scale, x_scale, shift, axis=axis)


def pack(mean: Array, meansqr: Array, weight: float, count: float, /) -> Array:
    """As `generic.pack`."""
    return _select_steps(mean, meansqr).pack(mean, meansqr, weight, count)


def unpack(summed: Array, shape: tuple[int, ...], weight: float, count: float, /) -> Unpacked:
    """As `generic.unpack`."""
    unpacked: Unpacked = _select_steps(summed).unpack(summed, shape, weight, count)
    return unpacked


def affine(
    var: Array, weight: Array | None, bias: Array | None, /, *, eps: float
) -> tuple[Array, Array]:
    """As `generic.affine`."""
    arrays = [v for v in (weight, bias) if v is not None]
    found: tuple[Array, Array] = _select_steps(var, *arrays).affine(var, weight, bias, eps=eps)
    return found


def over_std(v: Array, var: Array, /, *, eps: float) -> Array:
    """As `generic.over_std`."""
    return _select_steps(v, var).over_std(v, var, eps=eps)


def gradient_coefficients(
    var: Array,
    weight: Array | None,
    element_weight: Array,
    sum_dy: Array,
    sum_dy_xhat: Array,
    /,
    *,
    eps: float,
) -> tuple[Array, Array, Array]:
    """As `generic.gradient_coefficients`."""
    arrays = [sum_dy, sum_dy_xhat] if weight is None else [sum_dy, sum_dy_xhat, weight]
    found: tuple[Array, Array, Array] = _select_steps(var, *arrays).gradient_coefficients(
        var, weight, element_weight, sum_dy, sum_dy_xhat, eps=eps
    )
    return found


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


def _select_steps(first: Array, *others: Array) -> Any:
    """The file with steps for arrays like `first`."""
    name = _select(first, *others).__name__.rpartition(".")[2]
    return _native(f"{name}_steps" if name in ("host", "cuda") else "generic")


def _select(x: Array, *others: Array) -> Any:
    """The file for arrays like `x`."""
    if is_torch_array(x):
        torch = sys.modules["torch"]
        # What autograd differentiates must be made of torch's own operations.
        if torch.is_grad_enabled() and any(a.requires_grad for a in (x, *others)):
            return generic
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            return _native({"cpu": "host", "cuda": "cuda"}.get(x.device.type, "generic"))
        return generic
    if is_numpy_array(x):
        return _native("host")
    return _native("cupy") if is_cupy_array(x) else generic


@cache
def _native(name: str) -> Any:
    """The module; `generic` where that is asked for, or its compiler is not installed."""
    if os.environ.get("MULTIBN_KERNELS") == "generic":
        return generic
    try:
        return importlib.import_module(f"multibn.kernels.{name}")
    except ImportError:
        return generic
