"""The passes for CuPy arrays: reduction and elementwise kernels, for any memory layout.

No pass makes a temporary of the size of an activation. Arithmetic is in float64, in registers only:
activations are read and written in their own dtype, and reading and writing takes the time.
"""

import sys
from functools import partial
from typing import Any

import cupy

from multibn._typing import Array
from multibn.kernels import generic

_DTYPES = ("float16", "float32", "float64")


def _sum_kernel(arguments: str, term: str, name: str) -> cupy.ReductionKernel:
    return cupy.ReductionKernel(arguments, "float64 s", term, "a + b", "s = a", "0", name)


_D = "(static_cast<double>(x) - mean)"
_sum = _sum_kernel("T x", "static_cast<double>(x)", "multibn_sum")
_sum_of_squares = _sum_kernel("T x, float64 mean", f"{_D} * {_D}", "multibn_sum_of_squares")
_sum_of_products = _sum_kernel(
    "G dy, T x, float64 mean", f"static_cast<double>(dy) * {_D}", "multibn_sum_of_products"
)
_normalize = cupy.ElementwiseKernel(
    "T x, float64 mean, float64 scale, float64 shift",
    "T y",
    f"y = static_cast<T>({_D} * scale + shift)",
    "multibn_normalize",
)
_input_gradient = cupy.ElementwiseKernel(
    "G dy, T x, float64 mean, float64 dy_scale, float64 x_scale, float64 shift",
    "T dx",
    f"dx = static_cast<T>({_D} * x_scale + static_cast<double>(dy) * dy_scale + shift)",
    "multibn_input_gradient",
)


def local_moments(x: Array, /, *, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """As `generic.local_moments`."""
    if x.dtype.name not in _DTYPES:
        return generic.local_moments(x, axis=axis)
    n = max(generic.num_elements(x, axis), 1)
    mean = _reduce(_sum, x, axis=axis) / n
    return mean, _reduce(_sum_of_squares, x, _beside(x, mean, axis), axis=axis) / n


begin_forward = partial(generic.begin_forward, passes=sys.modules[__name__])
finish_forward = partial(generic.finish_forward, passes=sys.modules[__name__])
begin_backward = partial(generic.begin_backward, passes=sys.modules[__name__])
finish_backward = partial(generic.finish_backward, passes=sys.modules[__name__])
move = generic.move


def normalize(
    x: Array, /, *statistics: Any, residual: Array | None = None, relu: bool = False, **on: Any
) -> Array:
    """As `generic.normalize`."""
    y = _normalized(x, *statistics, **on)
    if residual is not None:
        y += residual
    return cupy.maximum(y, 0, out=y) if relu else y


def _normalized(x: Array, /, *statistics: Any, eps: float, axis: tuple[int, ...]) -> Array:
    mean, var, weight, bias = statistics
    if x.dtype.name not in _DTYPES:
        return generic.normalize(x, *statistics, eps=eps, axis=axis)
    scale = 1.0 / cupy.sqrt(var + eps)
    if weight is not None:
        scale *= weight
    shift = cupy.zeros_like(scale) if bias is None else generic.as_wide(bias)
    coefficients = (_beside(x, v, axis) for v in (mean, scale, shift))
    return _normalize(x, *coefficients, cupy.empty_like(x))


def backward_sums(
    dy: Array, x: Array, mean: Array, var: Array, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """As `generic.backward_sums`."""
    if x.dtype.name not in _DTYPES or dy.dtype.name not in _DTYPES:
        return generic.backward_sums(dy, x, mean, var, eps=eps, axis=axis)
    sum_dy_xmu = _reduce(_sum_of_products, dy, x, _beside(x, mean, axis), axis=axis)
    return _reduce(_sum, dy, axis=axis), sum_dy_xmu / cupy.sqrt(var + eps)


def input_gradient(
    dy: Array, x: Array, /, *statistics: Any, eps: float, axis: tuple[int, ...]
) -> Array:
    """As `generic.input_gradient`."""
    if x.dtype.name not in _DTYPES or dy.dtype.name not in _DTYPES:
        return generic.input_gradient(dy, x, *statistics, eps=eps, axis=axis)
    mean, *others = statistics
    coefficients = mean, *generic.gradient_coefficients(*others, eps=eps)
    columns = (_beside(x, v, axis) for v in coefficients)
    return _input_gradient(dy, x, *columns, cupy.empty_like(x))


def _beside(x: Array, v: Array, axis: tuple[int, ...]) -> Array:
    """Per-channel array `v`, shaped to broadcast against `x`."""
    return v.reshape(tuple(1 if i in axis else n for i, n in enumerate(x.shape)))


def _reduce(kernel: cupy.ReductionKernel, *arrays: Array, axis: tuple[int, ...]) -> Array:
    """`kernel` over the spatial axes, then a sum over the batch.

    CuPy computes each result by one block: this way N*C blocks run instead of C.
    """
    batch, *spatial = sorted(axis)
    if not spatial:
        return kernel(*arrays, axis=batch)
    return kernel(*arrays, axis=tuple(spatial)).sum(axis=batch)
