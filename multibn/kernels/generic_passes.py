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
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from array_api_compat import is_torch_namespace, to_device

from multibn._arrays import array_namespace, device
from multibn._typing import Array
from multibn.kernels.arguments import BatchStatistics, Gradient, Input


def output_coefficients(i: Input, batch: BatchStatistics, /) -> tuple[Array, Array, Array]:
    """Per channel `centre`, `scale` and `shift`; the output is `(x - centre) * scale + shift`.

    That is `(x - mean) / sqrt(var + eps) * weight + bias`.
    """
    centre, remainder = _round(batch.mean, i.x)
    scale = _times(_invstd(batch.var, i.eps), i.weight)
    shift = -remainder * scale
    return _narrow(i.x, centre, scale, shift if i.bias is None else as_wide(i.bias) + shift)


def finish(i: Input, coefficients: Sequence[Array], /) -> Array:
    """The output, after the residual and the ReLU."""
    x = i.x
    xp = array_namespace(x)
    centre, scale, shift = (per_channel(v, x, i.axis) for v in coefficients)
    # Not in place: vmap may give `shift` a batch that the product lacks.
    y = (xp.astype(x, centre.dtype, copy=False) - centre) * scale + shift
    y = xp.astype(y, x.dtype, copy=False)
    y = y if i.residual is None else y + i.residual
    return _where(~(y <= 0), y) if i.relu else y  # NaN stays


def backward_sums(g: Gradient, /) -> tuple[Array, Array]:
    """Sums over `axis` of `dy` and of `dy * (x - mean) / sqrt(var + eps)`, both wide."""
    x, axis = g.input.x, g.input.axis
    wide, remainder = _round(g.batch.mean, x)
    (centre,) = _narrow(x, wide)
    xp = array_namespace(x)
    dy = xp.astype(g.dy, centre.dtype, copy=False)
    d = xp.astype(x, centre.dtype, copy=False) - per_channel(centre, x, axis)
    sum_dy, sum_dy_d = _sum(dy, axis), _sum(dy * d, axis)
    return sum_dy, (sum_dy_d - remainder * sum_dy) * _invstd(g.batch.var, g.input.eps)


def gradient_coefficients(g: Gradient, sums: Sequence[Array], /) -> tuple[Array, ...]:
    """Per channel; the gradient of `x` is `(x - centre) * x_scale + dy * dy_scale + shift`.

    That is `weight * invstd * (dy - element_weight * (sum_dy + xhat * sum_dy_xhat))`, where
    `invstd = 1 / sqrt(var + eps)` and `xhat = (x - mean) * invstd`.
    """
    sum_dy, sum_dy_xhat = sums
    centre, remainder = _round(g.batch.mean, g.input.x)
    invstd = _invstd(g.batch.var, g.input.eps)
    dy_scale = _times(invstd, g.input.weight)
    pull = -dy_scale * g.batch.element_weight
    x_scale = pull * invstd * sum_dy_xhat
    shift = pull * sum_dy - remainder * x_scale
    return _narrow(g.input.x, centre, x_scale, dy_scale, shift)


def finish_gradient(g: Gradient, coefficients: Sequence[Array], /) -> Array:
    """The gradient of `x`."""
    x = g.input.x
    xp = array_namespace(x)
    centre, x_scale, dy_scale, shift = (per_channel(v, x, g.input.axis) for v in coefficients)
    dx = (xp.astype(x, centre.dtype, copy=False) - centre) * x_scale
    dx += xp.astype(g.dy, centre.dtype, copy=False) * dy_scale
    dx += shift
    return xp.astype(dx, x.dtype, copy=False)


def about(i: Input, mean: Array, /) -> tuple[Input, Array]:
    """The input less a mean, for its moments only; and the mean as it was taken away, wide."""
    xp, (centre,) = array_namespace(i.x), _narrow(i.x, mean)
    x = xp.astype(i.x, centre.dtype, copy=False) - per_channel(centre, i.x, i.axis)
    return i._replace(x=x, residual=None, relu=False, running=None), as_wide(centre)


def local_moments(
    x: Array, /, axis: tuple[int, ...], mask: Array | None = None, count: Any = None
) -> tuple[Array, Array]:
    """Mean and biased variance of `x` over `axis`, both wide; zeros for an empty `x`.

    Two passes: a rounded mean, then first and second moments about it, which correct the
    rounding error of the mean and avoid cancellation in the variance. With a mask, `count` is
    the number of elements per channel that take part.
    """
    xp = array_namespace(x)
    x = masked(xp.astype(x, arithmetic_dtype(xp, x.dtype), copy=False), mask)
    n = at_least_one(num_elements(x, axis) if mask is None else count)
    (centre,) = _narrow(x, _sum(x, axis) / n)
    d = masked(x - per_channel(centre, x, axis), mask)
    first, second = _sum(d, axis) / n, _sum(d * d, axis) / n
    return as_wide(centre) + first, xp.clip(second - first * first, 0.0, None)


def per_channel(v: Array, x: Array, axis: tuple[int, ...], /) -> Array:
    """`v` shaped to broadcast against `x`."""
    return array_namespace(v).reshape(
        v, tuple(1 if i in axis else n for i, n in enumerate(x.shape))
    )


def _sum(v: Array, axis: tuple[int, ...], /) -> Array:
    """The wide sum over `axis`."""
    xp = array_namespace(v)
    # torch sums float32 in a cascade (relative error 2e-7 at 2M values), and dtype=float64
    # would make it copy `v`; NumPy sums outer axes one by one, and dtype=float64 costs it no
    # copy.
    if is_torch_namespace(xp) or not _has_float64(xp, device(v)):
        return as_wide(xp.sum(v, axis=axis))
    return xp.sum(v, axis=axis, dtype=xp.float64)


def as_wide(v: Array, /) -> Array:
    """Per-channel array `v` in float64; in host memory if its device has no float64."""
    xp = array_namespace(v)
    if v.dtype == xp.float64:
        return v
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


def _round(mean: Array, x: Array) -> tuple[Array, Array]:
    """The mean rounded to the arithmetic dtype of `x`, and the remainder, both wide."""
    xp = array_namespace(mean)
    centre = as_wide(xp.astype(mean, arithmetic_dtype(xp, x.dtype), copy=False))
    return centre, mean - centre


def _narrow(x: Array, /, *values: Array) -> tuple[Array, ...]:
    """Per-channel arrays in the arithmetic dtype of `x`, on its device."""
    xp = array_namespace(x)
    dtype = arithmetic_dtype(xp, x.dtype)
    return tuple(to_device(xp.astype(v, dtype, copy=False), device(x)) for v in values)
