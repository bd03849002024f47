"""The passes and the steps in the array API standard: the reference, for any library.

Activations `x` and `dy` have any number of dimensions; `axis` names the reduced axes, and a
per-channel array has the shape of the other axes, `(C,)` for `axis=(0, 2, 3)` of `(N, C, H, W)`.
Per-channel arrays are wide (see `as_wide`). Arithmetic on activations is done in their own dtype,
or in float32 for 16-bit dtypes, and results have the dtype of `x`.

A wide mean is split into a centre, the mean rounded to the arithmetic dtype, and the remainder:
`x - centre` is then nearly exact in float32 even where mean/std is 1e4, and the remainder goes into
the (C,)-sized coefficients.

`+=` is allowed only on sums of products: autograd, which differentiates these passes for second
order, saves the factors of `a * b` but never the result.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

from array_api_compat import is_torch_namespace, to_device

from multibn import message
from multibn._arrays import array_namespace, device, is_on_host, is_traced, to_host, values
from multibn._typing import Array


def local_moments(x: Array, /, *, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance of `x` over `axis`, both wide; zeros for an empty `x`.

    Two passes: a rounded mean, then first and second moments about it, which correct the rounding
    error of the mean and avoid cancellation in the variance.
    """
    xp = array_namespace(x)
    x = xp.astype(x, _arithmetic_dtype(xp, x.dtype), copy=False)
    n = max(num_elements(x, axis), 1)
    centre = xp.astype(_sum(x, axis) / n, x.dtype)
    d = x - _per_channel(centre, x, axis)
    first = _sum(d, axis) / n
    second = _sum(d * d, axis) / n
    return as_wide(centre) + first, xp.clip(second - first * first, 0.0, None)


def packed_moments(
    x: Array, weight: float, count: float, /, *, axis: tuple[int, ...], out: Array | None = None
) -> Array:
    """`pack` of the moments of `x` over `axis`."""
    mean, var = local_moments(x, axis=axis)
    return pack(mean, var + mean * mean, weight, count, out=out)


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
) -> Array:
    """`(x - mean) / sqrt(var + eps) * weight + bias`, in the dtype of `x`."""
    xp = array_namespace(x)
    dtype = _arithmetic_dtype(xp, x.dtype)
    centre, remainder = _round(mean, dtype)
    scale = _times(_invstd(var, eps), weight)
    shift = -remainder * scale if bias is None else as_wide(bias) - remainder * scale
    d = xp.astype(x, dtype, copy=False) - _per_channel(centre, x, axis)
    y = d * _per_channel(scale, x, axis, dtype)
    # Not in place: vmap may give `shift` a batch that `y` lacks.
    return xp.astype(y + _per_channel(shift, x, axis, dtype), x.dtype, copy=False)


def backward_sums(
    dy: Array, x: Array, mean: Array, var: Array, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """Sums over `axis` of `dy` and of `dy * (x - mean) / sqrt(var + eps)`, both wide."""
    xp = array_namespace(x)
    dtype = _arithmetic_dtype(xp, x.dtype)
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
    dtype = _arithmetic_dtype(xp, x.dtype)
    centre, remainder = _round(mean, dtype)
    dy_scale, x_scale, shift = gradient_coefficients(
        var, weight, element_weight, sum_dy, sum_dy_xhat, eps=eps
    )
    d = xp.astype(x, dtype, copy=False) - _per_channel(centre, x, axis)
    dx = d * _per_channel(x_scale, x, axis, dtype)
    dx += xp.astype(dy, dtype, copy=False) * _per_channel(dy_scale, x, axis, dtype)
    dx += _per_channel(shift - remainder * x_scale, x, axis, dtype)
    return xp.astype(dx, x.dtype, copy=False)


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
    """The input's gradient is linear in `dy` and `x - mean`: the two slopes and the intercept."""
    s = _invstd(var, eps)
    scale = _times(s, weight)
    pull = -scale * element_weight
    return scale, pull * s * sum_dy_xhat, pull * sum_dy


class Unpacked(NamedTuple):
    """The statistics of a summed message.

    On a GPU, where reading would wait, `refused` is always False and `finite` always True.
    """

    mean: Array
    var: Array
    count: Array
    element_weight: Array
    refused: bool
    finite: bool


def pack(
    mean: Array, meansqr: Array, weight: float, count: float, /, *, out: Array | None = None
) -> Array:
    """A layer's forward payload, see `multibn.message`: a new vector, or `out`."""
    xp = array_namespace(mean)
    numbers = [xp.full((1,), v, dtype=mean.dtype, device=device(mean)) for v in (weight, count)]
    packed = message.concat([weight * mean, weight * meansqr, *numbers])
    if out is None:
        return packed
    out[:] = to_host(packed)
    return out


def unpack(
    summed: Array,
    shape: tuple[int, ...],
    weight: float,
    count: float,
    /,
    *,
    like: Array | None = None,
) -> Unpacked:
    """Statistics from the sum of all ranks' payloads; `weight` and `count` are this rank's.

    Per-channel arrays get `shape`. Pass `like` if `summed` is NumPy memory that the transport will
    use again: the results are then copies, of the library of `like`.
    """
    if like is not None:
        summed = array_namespace(like).asarray(summed.copy())
    xp = array_namespace(summed)
    C = math.prod(shape)
    meansqr = summed[C : 2 * C]
    total_weight, total_count = (
        xp.reshape(values(summed[2 * C + i]), (-1,))[0]  # the same in all of a batch of vmap
        for i in (message.WEIGHT, message.COUNT)
    )
    refused, finite = False, True
    if is_on_host(summed) and not is_traced(summed):
        refused = bool(xp.isnan(total_count))
        finite = bool(xp.all(xp.isfinite(values(xp.sum(meansqr)))))
    divisor = xp.where(total_weight == 0.0, xp.ones_like(total_weight), total_weight)
    mean = summed[:C] / divisor
    return Unpacked(
        xp.reshape(mean, shape),
        xp.reshape(xp.clip(meansqr / divisor - mean * mean, 0.0, None), shape),
        total_count,
        weight / (max(count, 1.0) * divisor),
        refused,
        finite,
    )


def move_averages(
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    momentum: float | Array,
    factor: float | Array,
    /,
) -> tuple[Array, Array]:
    """New arrays `running + momentum * (new - running)`; the new variance is `factor * var`."""
    return _move(running_mean, mean, momentum), _move(running_var, var * factor, momentum)


def as_wide(v: Array, /) -> Array:
    """Per-channel array `v` in float64; in host memory if its device has no float64."""
    xp = array_namespace(v)
    if not _has_float64(xp, device(v)):
        cpu = "cpu" if is_torch_namespace(xp) else xp.__array_namespace_info__().default_device()
        v = to_device(v, cpu)
    return xp.astype(v, xp.float64, copy=False)


def num_elements(x: Array, axis: tuple[int, ...]) -> int:
    """Number of elements of `x` per channel: N*H*W... for images."""
    return math.prod(x.shape[i] for i in axis)


@lru_cache(maxsize=64)
def _has_float64(xp: Any, where: Any) -> bool:
    return "float64" in xp.__array_namespace_info__().dtypes(device=where)


def _arithmetic_dtype(xp: Any, dtype: Any) -> Any:
    return xp.float32 if xp.finfo(dtype).bits < 32 else dtype


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


def _invstd(var: Array, eps: float) -> Array:
    return 1.0 / array_namespace(var).sqrt(var + eps)


def _times(scale: Array, weight: Array | None) -> Array:
    return scale if weight is None else scale * as_wide(weight)


def _move(running: Array, new: Array, momentum: float | Array) -> Array:
    xp = array_namespace(running)
    # running + momentum * (new - running) would keep rounding errors of `running` at momentum 1.
    wide = (1 - momentum) * as_wide(running) + momentum * new
    return to_device(xp.astype(wide, running.dtype, copy=False), device(running))
