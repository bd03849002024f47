"""The verbs in the array API standard: the reference, for any library.

The verbs come first, then the passes over activations. `steps` has the arithmetic on channels
between an activation and a message.

Arithmetic on activations is done in their own dtype, or in float32 for 16-bit dtypes, and results
have the dtype of `x`. A wide mean (see `steps.as_wide`) is split into a centre, the mean
rounded to the arithmetic dtype, and the remainder: `x - centre` is then nearly exact in float32
even where mean/std is 1e4, and the remainder goes into the (C,)-sized coefficients.

`+=` is allowed only on sums of products: autograd, which differentiates the passes for second
order, saves the factors of `a * b` but never the result.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import is_torch_namespace, to_device

from multibn import wire
from multibn._arrays import array_namespace, device, to_host
from multibn._typing import Array
from multibn.kernels.spec import (
    OK,
    BatchStatistics,
    Gradient,
    NormArgs,
    PackedStatistics,
    pack_statistics,
    split_sums,
    unpack,
)
from multibn.kernels.steps import (
    as_wide,
    at_least_one,
    has_float64,
    pack,
    statistics_of,
    sum_like,
    update_running,
)
from multibn.kernels.steps import parameter_gradients as parameter_gradients

# If NumPy's warnings are errors, an overflow would raise on one rank only, before its message.
_quietly = np.errstate(all="ignore")


@_quietly
def begin_forward(
    args: NormArgs,
    rank_weight: float | Array,
    count: float | Array,
    mark: float = wire.NO_BIT,
    /,
    *,
    out: Any = None,
) -> Array:
    """Return this rank's payload of the forward message, see `multibn.wire`.

    `rank_weight` is the weight of this rank. `count` is its elements per channel, without masked
    elements. If the mask is on a GPU, both are arrays of shape `()`. `mark` replaces moments that
    are not finite. If given, `out` gets the payload and is returned: a `multibn.wire.Message`, or a
    float64 NumPy vector.
    """
    mean, var = local_moments(args, count)
    return _written(pack(mean, var + mean * mean, rank_weight, count, mark), out)


@_quietly
def finish_forward(
    args: NormArgs,
    summed: Array,
    rank_weight: float | Array,
    count: float | Array,
    /,
    *,
    coefficients: bool = False,
) -> tuple[Array, PackedStatistics, int]:
    """Normalize by the sum of all ranks' payloads, and update the running statistics.

    Returns the output, the statistics of the whole batch, and the state of the message. If the
    state is not `OK`, the running statistics are unchanged and the output is undefined. `summed` is
    on the device of `x` or in host memory. No reference to it is kept: it may be the channel's
    buffer. `coefficients` is as in `normalize`.
    """
    batch, state = statistics_of(args, summed, rank_weight, count)
    packed = pack_statistics(batch)
    y = normalize(args, packed, coefficients=coefficients)
    if args.running is not None and state == OK:
        update_running(args.running, *batch[:3], count)
    return y, packed, state


def normalize(args: NormArgs, batch: PackedStatistics, /, *, coefficients: bool = False) -> Array:
    """Return the output by known statistics, in the dtype of `x`. Updates no running statistics.

    With `coefficients`, returns the `output_coefficients` instead, as the rows of one new array.
    """
    found = output_coefficients(args, unpack(batch))
    return array_namespace(found[0]).stack(found) if coefficients else finish(args, found)


@_quietly
def begin_backward(g: Gradient, /, *, out: Any = None) -> tuple[Array, Array | None, Array | None]:
    """Return this rank's payload of the backward message, and the gradients of weight and bias.

    The payload has the sums over `axis` of `dy` and of `dy * xhat`, where `xhat = (x - mean) /
    sqrt(var + eps)`. The gradients are copies of the same numbers in the dtypes of `weight` and
    `bias`; None for a parameter that is None. `out` is as in `begin_forward`.
    """
    pre, batch = _before_relu(g), unpack(g.batch)
    x, axis = pre.input.x, pre.input.axis
    wide, remainder = _round(batch.mean, x)
    (centre,) = _narrow(x, wide)
    xp = array_namespace(x)
    dy = xp.astype(pre.dy, centre.dtype, copy=False)
    d = xp.astype(x, centre.dtype, copy=False) - per_channel(centre, x, axis)
    sum_dy, sum_dy_d = _sum(dy, axis), _sum(dy * d, axis)
    sum_dy_xhat = (sum_dy_d - remainder * sum_dy) * invstd_of(batch.var, g.input)
    payload = wire.concat((sum_dy, sum_dy_xhat))
    return _written(payload, out), *parameter_gradients(payload, g)


@_quietly
def finish_backward(
    g: Gradient, summed: Array, /, *, coefficients: bool = False
) -> tuple[Array, Array | None]:
    """Return the gradients of `x` and, if `y` is passed, of the residual before the ReLU.

    `summed` is the sum of all ranks' payloads, as in `finish_forward`. With `coefficients`, returns
    the `gradient_coefficients`, stacked as in `normalize`, and None.
    """
    found = gradient_coefficients(g, summed)
    if coefficients:
        return array_namespace(found[0]).stack(found), None
    return finish_gradient(g, found), None if g.y is None else residual_gradient(g)


def residual_gradient(g: Gradient, /) -> Array:
    """Return the gradient of a residual, if `finish_backward` did not compute it."""
    return masked(g.dy, g.input.mask) if g.y is None else rectified(g.dy, g.y)


def output_coefficients(args: NormArgs, batch: BatchStatistics, /) -> tuple[Array, Array, Array]:
    """Return `centre`, `scale` and `shift` of each channel.

    The output, `(x - mean) / sqrt(var + eps) * weight + bias`, is `(x - centre) * scale + shift`.
    """
    centre, remainder = _round(batch.mean, args.x)
    scale = _times(invstd_of(batch.var, args), args.weight)
    shift = -remainder * scale
    return _narrow(
        args.x, centre, scale, shift if args.bias is None else as_wide(args.bias) + shift
    )


def finish(args: NormArgs, coefficients: Sequence[Array], /) -> Array:
    """Return the output by `output_coefficients`, after the residual and the ReLU."""
    x = masked(args.x, args.mask)
    xp = array_namespace(x)
    centre, scale, shift = (per_channel(v, x, args.axis) for v in coefficients)
    # Not in place: vmap may give `shift` a batch that the product lacks.
    y = (xp.astype(x, centre.dtype, copy=False) - centre) * scale + shift
    y = xp.astype(y, x.dtype, copy=False)
    y = y if args.residual is None else y + args.residual
    return masked(_where(~(y <= 0), y) if args.relu else y, args.mask)  # NaN stays


def gradient_coefficients(g: Gradient, summed: Array, /) -> tuple[Array, ...]:
    """Return the coefficients per channel of `dx = (x - centre) * x_scale + dy * dy_scale + shift`.

    The gradient is `weight * invstd * (dy - element_weight * (sum_dy + xhat * sum_dy_xhat))`, where
    `invstd = 1 / sqrt(var + eps)` and `xhat = (x - mean) * invstd`.
    """
    batch = unpack(g.batch)
    sum_dy, sum_dy_xhat = split_sums(sum_like(summed, batch.mean), batch.mean.shape)
    centre, remainder = _round(batch.mean, g.input.x)
    invstd = invstd_of(batch.var, g.input)
    dy_scale = _times(invstd, g.input.weight)
    pull = -dy_scale * batch.element_weight
    x_scale = pull * invstd * sum_dy_xhat
    shift = pull * sum_dy - remainder * x_scale
    return _narrow(g.input.x, centre, x_scale, dy_scale, shift)


def finish_gradient(g: Gradient, coefficients: Sequence[Array], /) -> Array:
    """Return the gradient of `x` by `gradient_coefficients`."""
    g = _before_relu(g)
    x = g.input.x
    xp = array_namespace(x)
    centre, x_scale, dy_scale, shift = (per_channel(v, x, g.input.axis) for v in coefficients)
    dx = (xp.astype(x, centre.dtype, copy=False) - centre) * x_scale
    of_dy = xp.astype(g.dy, centre.dtype, copy=False) * dy_scale
    of_dy += shift  # first, as in the C core: compiled code then gives equal bits
    dx += of_dy
    return masked(xp.astype(dx, x.dtype, copy=False), g.input.mask)


def centered(args: NormArgs, mean: Array, /) -> tuple[NormArgs, Array]:
    """Return `x - mean` (for computing moments only), and the subtracted mean in float64."""
    xp, (centre,) = array_namespace(args.x), _narrow(args.x, mean)
    x = xp.astype(args.x, centre.dtype, copy=False) - per_channel(centre, args.x, args.axis)
    return args._replace(x=x, residual=None, relu=False, running=None), as_wide(centre)


def local_moments(args: NormArgs, count: float | Array, /) -> tuple[Array, Array]:
    """Return the mean and biased variance of this rank's input, in float64; 0 if it is empty.

    Two passes: a rounded mean, then first and second moments about it, which correct the
    rounding error of the mean and avoid cancellation in the variance. With a mask, `count` is
    the number of unmasked elements per channel.
    """
    x, axis, mask = args.x, args.axis, args.mask
    xp = array_namespace(x)
    x = masked(xp.astype(x, arithmetic_dtype(xp, x.dtype), copy=False), mask)
    n = at_least_one(math.prod(x.shape[i] for i in axis) if mask is None else count)
    (centre,) = _narrow(x, _sum(x, axis) / n)
    d = masked(x - per_channel(centre, x, axis), mask)
    first, second = _sum(d, axis) / n, _sum(d * d, axis) / n
    return as_wide(centre) + first, xp.clip(second - first * first, 0.0, None)


def _before_relu(g: Gradient) -> Gradient:
    """Return the arguments for the gradient before the ReLU, with zeros for masked elements."""
    args = g.input._replace(x=masked(g.input.x, g.input.mask), residual=None, running=None)
    dy = g.dy
    if args.relu:
        dy = rectified(dy, normalize(args._replace(relu=False), g.batch) if g.y is None else g.y)
    return g._replace(dy=masked(dy, args.mask), input=args)


def _written(payload: Array, out: Any) -> Array:
    """Return the payload, or `out` after writing the payload into it."""
    if out is None:
        return payload
    if isinstance(out, wire.Message):
        return out.write(payload)
    out[:] = to_host(payload)
    return out


def per_channel(v: Array, x: Array, axis: tuple[int, ...], /) -> Array:
    """Return `v` shaped to broadcast against `x`."""
    return array_namespace(v).reshape(
        v, tuple(1 if i in axis else n for i, n in enumerate(x.shape))
    )


def _sum(v: Array, axis: tuple[int, ...], /) -> Array:
    """Return the float64 sum over `axis`."""
    xp = array_namespace(v)
    # torch sums float32 in a cascade (relative error 2e-7 at 2M values), and dtype=float64
    # would make it copy `v`; NumPy sums outer axes one by one, and dtype=float64 costs it no
    # copy.
    if is_torch_namespace(xp) or not has_float64(xp, device(v)):
        return as_wide(xp.sum(v, axis=axis))
    return xp.sum(v, axis=axis, dtype=xp.float64)


def arithmetic_dtype(xp: Any, dtype: Any) -> Any:
    return xp.float32 if xp.finfo(dtype).bits < 32 else dtype


def masked(x: Array, mask: Array | None, /) -> Array:
    """Return `x`, with 0 where the mask is False."""
    return x if mask is None else _where(mask, x)


def rectified(dy: Array, y: Array, /) -> Array:
    """Return the gradient before a ReLU whose output was `y`."""
    return _where(y > 0, dy)


def _where(condition: Array, x: Array) -> Array:
    """Return `x`, with 0 where the condition is False."""
    xp = array_namespace(x)
    return xp.where(condition, x, xp.zeros((), dtype=x.dtype, device=device(x)))


def invstd_of(var: Array, args: NormArgs, /) -> Array:
    """Return `1 / sqrt(var + eps)`, by which `normalize` multiplies."""
    return 1.0 / array_namespace(var).sqrt(var + args.eps)


def _times(scale: Array, weight: Array | None) -> Array:
    return scale if weight is None else scale * as_wide(weight)


def _round(mean: Array, x: Array) -> tuple[Array, Array]:
    """Return the mean rounded to the arithmetic dtype of `x`, and the remainder, in float64."""
    xp = array_namespace(mean)
    centre = as_wide(xp.astype(mean, arithmetic_dtype(xp, x.dtype), copy=False))
    return centre, mean - centre


def _narrow(x: Array, /, *values: Array) -> tuple[Array, ...]:
    """Return per-channel arrays in the arithmetic dtype of `x`, on the device of `x`."""
    xp = array_namespace(x)
    dtype = arithmetic_dtype(xp, x.dtype)
    return tuple(to_device(xp.astype(v, dtype, copy=False), device(x)) for v in values)
