"""The passes over an activation in the array API standard, which `generic`'s verbs are made of.

Activations `x` and `dy` have any number of dimensions; `axis` names the reduced axes, and a
per-channel array has the shape of the other axes, `(C,)` for `axis=(0, 2, 3)` of `(N, C, H, W)`.
Per-channel arrays are wide (see `as_wide`), but for weight, bias and running statistics, which have
any floating-point dtype. Arithmetic on activations is done in their own dtype, or in float32 for
16-bit dtypes, and results have the dtype of `x`.

A wide mean is split into a centre, the mean rounded to the arithmetic dtype, and the remainder:
`x - centre` is then nearly exact in float32 even where mean/std is 1e4, and the remainder goes into
the (C,)-sized coefficients.

`+=` is allowed only on sums of products: autograd, which differentiates these passes for second
order, saves the factors of `a * b` but never the result.
"""

import math
from functools import lru_cache
from typing import Any

from array_api_compat import is_torch_namespace, to_device

from multibn._arrays import array_namespace, device
from multibn._typing import Array


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
    """`(x - mean) / sqrt(var + eps) * weight + bias + residual`, then ReLU, in the dtype of `x`."""
    xp = array_namespace(x)
    dtype = arithmetic_dtype(xp, x.dtype)
    centre, scale, shift = coefficients(mean, var, weight, bias, eps=eps, dtype=dtype)
    d = xp.astype(x, dtype, copy=False) - _per_channel(centre, x, axis)
    y = d * _per_channel(scale, x, axis, dtype)
    # Not in place: vmap may give `shift` a batch that `y` lacks.
    y = xp.astype(y + _per_channel(shift, x, axis, dtype), x.dtype, copy=False)
    if residual is not None:
        y = y + residual
    return xp.where(y <= 0, xp.zeros((), dtype=y.dtype, device=device(y)), y) if relu else y


def coefficients(
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    /,
    *,
    eps: float,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Centre, scale and shift: `normalize` computes `(x - centre) * scale + shift`.

    The centre has the dtype of the arithmetic, `dtype`; the others are wide.
    """
    centre, remainder = _round(mean, dtype)
    scale = _times(_invstd(var, eps), weight)
    shift = -remainder * scale if bias is None else as_wide(bias) - remainder * scale
    return centre, scale, shift


def local_moments(
    x: Array, /, *, axis: tuple[int, ...], mask: Array | None = None, count: Array | None = None
) -> tuple[Array, Array]:
    """Mean and biased variance of `x` over `axis`, both wide; zeros for an empty `x`.

    Two passes: a rounded mean, then first and second moments about it, which correct the rounding
    error of the mean and avoid cancellation in the variance. With a mask, `count` is the number of
    elements per channel that take part.
    """
    xp = array_namespace(x)
    x = masked(xp.astype(x, arithmetic_dtype(xp, x.dtype), copy=False), mask)
    n = at_least_one(num_elements(x, axis) if mask is None or count is None else count)
    centre = xp.astype(_sum(x, axis) / n, x.dtype)
    d = masked(x - _per_channel(centre, x, axis), mask)
    first = _sum(d, axis) / n
    second = _sum(d * d, axis) / n
    return as_wide(centre) + first, xp.clip(second - first * first, 0.0, None)


def backward_sums(
    dy: Array, x: Array, mean: Array, var: Array, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """Sums over `axis` of `dy` and of `dy * (x - mean) / sqrt(var + eps)`, both wide."""
    xp = array_namespace(x)
    dtype = arithmetic_dtype(xp, x.dtype)
    centre, remainder = _round(mean, dtype)
    dy = xp.astype(dy, dtype, copy=False)
    d = xp.astype(x, dtype, copy=False) - _per_channel(centre, x, axis)
    sum_dy = _sum(dy, axis)
    return sum_dy, (_sum(dy * d, axis) - remainder * sum_dy) * _invstd(var, eps)


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
    """`weight * invstd * (dy - element_weight * (sum_dy + xhat * sum_dy_xhat))`, like `x`.

    Here `invstd = 1 / sqrt(var + eps)` and `xhat = (x - mean) * invstd`.
    """
    xp = array_namespace(x)
    dtype = arithmetic_dtype(xp, x.dtype)
    centre, x_scale, dy_scale, shift = gradient_coefficients(
        mean, var, weight, element_weight, sum_dy, sum_dy_xhat, eps=eps, dtype=dtype
    )
    d = xp.astype(x, dtype, copy=False) - _per_channel(centre, x, axis)
    dx = d * _per_channel(x_scale, x, axis, dtype)
    dx += xp.astype(dy, dtype, copy=False) * _per_channel(dy_scale, x, axis, dtype)
    dx += _per_channel(shift, x, axis, dtype)
    return xp.astype(dx, x.dtype, copy=False)


def gradient_coefficients(
    mean: Array,
    var: Array,
    weight: Array | None,
    element_weight: Array,
    sum_dy: Array,
    sum_dy_xhat: Array,
    /,
    *,
    eps: float,
    dtype: Any,
) -> tuple[Array, Array, Array, Array]:
    """As `coefficients`, for the gradient `(x - centre) * x_scale + dy * dy_scale + shift`."""
    centre, remainder = _round(mean, dtype)
    s = _invstd(var, eps)
    dy_scale = _times(s, weight)
    pull = -dy_scale * element_weight
    x_scale = pull * s * sum_dy_xhat
    return centre, x_scale, dy_scale, pull * sum_dy - remainder * x_scale


def as_wide(v: Array, /) -> Array:
    """Per-channel array `v` in float64; in host memory if its device has no float64."""
    xp = array_namespace(v)
    if not _has_float64(xp, device(v)):
        cpu = "cpu" if is_torch_namespace(xp) else xp.__array_namespace_info__().default_device()
        v = to_device(v, cpu)
    return xp.astype(v, xp.float64, copy=False)


@lru_cache(maxsize=64)
def _has_float64(xp: Any, where: Any) -> bool:
    return "float64" in xp.__array_namespace_info__().dtypes(device=where)


def arithmetic_dtype(xp: Any, dtype: Any) -> Any:
    return xp.float32 if xp.finfo(dtype).bits < 32 else dtype


def num_elements(x: Array, axis: tuple[int, ...]) -> int:
    """Number of elements of `x` per channel: N*H*W... for images."""
    return math.prod(x.shape[i] for i in axis)


def at_least_one(count: float | Array, /) -> float | Array:
    """`count`, or 1 if that is larger: a divisor."""
    if hasattr(count, "dtype"):
        return array_namespace(count).clip(count, 1.0, None)
    return max(count, 1.0)  # a number, or torch.compile's symbol for one


def masked(x: Array, mask: Array | None, /) -> Array:
    """`x`, and 0 where the mask is False."""
    return x if mask is None else _where(mask, x)


def rectified(dy: Array, y: Array, /) -> Array:
    """The gradient before a ReLU whose output was `y`."""
    return _where(y > 0, dy)


def _where(condition: Array, x: Array) -> Array:
    """`x`, and 0 where the condition is False."""
    xp = array_namespace(x)
    return xp.where(condition, x, xp.zeros((), dtype=x.dtype, device=device(x)))


def _invstd(var: Array, eps: float) -> Array:
    return 1.0 / array_namespace(var).sqrt(var + eps)


def _times(scale: Array, weight: Array | None) -> Array:
    return scale if weight is None else scale * as_wide(weight)


def _round(mean: Array, dtype: Any) -> tuple[Array, Array]:
    xp = array_namespace(mean)
    centre = xp.astype(mean, dtype, copy=False)
    return centre, mean - as_wide(centre)


def _per_channel(v: Array, x: Array, axis: tuple[int, ...], dtype: Any = None) -> Array:
    """`v` with the dtype and on the device of `x`, shaped to broadcast against it."""
    xp = array_namespace(v)
    if dtype is not None:
        v = xp.astype(v, dtype, copy=False)
    return xp.reshape(
        to_device(v, device(x)), tuple(1 if i in axis else n for i, n in enumerate(x.shape))
    )


def _sum(v: Array, axis: tuple[int, ...]) -> Array:
    """Wide sum of `v` over `axis`."""
    xp = array_namespace(v)
    # torch sums float32 in a cascade (relative error 2e-7 at 2M values), and dtype=float64 would
    # make it copy `v`; NumPy sums outer axes one by one, and dtype=float64 costs it no copy.
    if is_torch_namespace(xp) or not _has_float64(xp, device(v)):
        return as_wide(xp.sum(v, axis=axis))
    return xp.sum(v, axis=axis, dtype=xp.float64)
