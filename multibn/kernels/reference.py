"""The verbs in the array API standard: the reference, for any library.

First the verbs, then the passes over activations, and the steps between an activation and a
message.

Per-channel arrays are wide (see `as_wide`), but for weight, bias and running statistics, which have
any floating-point dtype. Arithmetic on activations is done in their own dtype, or in float32 for
16-bit dtypes, and results have the dtype of `x`. A wide mean is split into a centre, the mean
rounded to the arithmetic dtype, and the remainder: `x - centre` is then nearly exact in float32
even where mean/std is 1e4, and the remainder goes into the (C,)-sized coefficients.

`+=` is allowed only on sums of products: autograd, which differentiates the passes for second
order, saves the factors of `a * b` but never the result.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import is_torch_namespace, to_device

from multibn import wire
from multibn._arrays import (
    array_namespace,
    device,
    is_abstract,
    is_on_host,
    is_traced,
    to_host,
    values,
)
from multibn._typing import Array, RunningVar, check_choice
from multibn.kernels.layout import channels
from multibn.kernels.spec import (
    CANCELLED,
    LEAST_SHARES,
    NOT_FINITE,
    OK,
    ONE_VALUE,
    REFUSED,
    BatchStatistics,
    Gradient,
    NormArgs,
    Running,
)


def begin_forward(
    args: NormArgs,
    rank_weight: float | Array,
    count: float | Array,
    mark: float = wire.NO_MARK,
    /,
    *,
    out: Any = None,
) -> Array:
    """This rank's numbers for the forward message: a layer's payload, see `multibn.wire`.

    `rank_weight` is what this rank counts for, `count` its elements per channel, those of the mask
    only if there is one; with a mask on a GPU, both are arrays of shape `()`. `mark` takes the
    place of moments that are not finite. `out` gets the payload and is returned: a
    `message.Message`, or a float64 vector of NumPy's.
    """
    mean, var = local_moments(args.x, args.axis, args.mask, count)
    return _written(pack(mean, var + mean * mean, rank_weight, count, mark), out)


def finish_forward(
    args: NormArgs,
    summed: Array,
    rank_weight: float | Array,
    count: float | Array,
    /,
    *,
    coefficients: bool = False,
) -> tuple[Array, BatchStatistics, int]:
    """Normalize by the sum of all ranks' payloads, and move the running statistics.

    Returns the output, the statistics of the whole batch, and `OK`, or what is wrong with the
    message: the running statistics then stay as they are, and the output may be anything. `summed`
    is on the device of `x` or in host memory, and is not kept: the memory may be the channel's.
    With `coefficients`, the output is left to the caller, as in `normalize`.
    """
    batch, state = _unpack(args, summed, rank_weight, count)
    y = normalize(args, batch, coefficients=coefficients)
    if args.running is not None and state == OK:
        update_running(args.running, *batch[:3], count)
    return y, batch, state


def normalize(args: NormArgs, batch: BatchStatistics, /, *, coefficients: bool = False) -> Array:
    """The output by known statistics, in the dtype of `x`. No running statistics are moved.

    With `coefficients`, these take the place of the output: one new array, of which each row is one
    of the `output_coefficients`.
    """
    found = output_coefficients(args, batch)
    return array_namespace(found[0]).stack(found) if coefficients else finish(args, found)


def begin_backward(g: Gradient, /, *, out: Any = None) -> tuple[Array, Array | None, Array | None]:
    """This rank's numbers for the backward message, and the gradients of weight and bias.

    The payload has the sums over `axis` of `dy` and of `dy * xhat`, where
    `xhat = (x - mean) / sqrt(var + eps)`. The gradients are the same numbers in memory of their own
    and in the dtypes of `weight` and `bias`, None where a parameter is. `out` is as in
    `begin_forward`.
    """
    pre = _before_relu(g)
    x, axis = pre.input.x, pre.input.axis
    wide, remainder = _round(g.batch.mean, x)
    (centre,) = _narrow(x, wide)
    xp = array_namespace(x)
    dy = xp.astype(pre.dy, centre.dtype, copy=False)
    d = xp.astype(x, centre.dtype, copy=False) - per_channel(centre, x, axis)
    sum_dy, sum_dy_d = _sum(dy, axis), _sum(dy * d, axis)
    sum_dy_xhat = (sum_dy_d - remainder * sum_dy) * _invstd(g.batch.var, g.input.eps)
    payload = wire.concat((sum_dy, sum_dy_xhat))
    return _written(payload, out), *parameter_gradients(payload, g)


def finish_backward(
    g: Gradient, summed: Array, /, *, coefficients: bool = False
) -> tuple[Array, Array | None]:
    """The gradients of `x` and, if `y` is passed, of the residual before the ReLU.

    `summed` is the sum of all ranks' payloads, as in `finish_forward`. With `coefficients`, the
    `gradient_coefficients` take the place of the first, as in `normalize`, and there is no second.
    """
    found = gradient_coefficients(g, summed)
    if coefficients:
        return array_namespace(found[0]).stack(found), None
    return finish_gradient(g, found), None if g.y is None else residual_gradient(g)


def residual_gradient(g: Gradient, /) -> Array:
    """The gradient of a residual, where `finish_backward` has not made it in its own pass."""
    return masked(g.dy, g.input.mask) if g.y is None else rectified(g.dy, g.y)


def output_coefficients(args: NormArgs, batch: BatchStatistics, /) -> tuple[Array, Array, Array]:
    """`centre`, `scale` and `shift` of each channel; the output is `(x - centre) * scale + shift`.

    The output is `(x - mean) / sqrt(var + eps) * weight + bias`.
    """
    centre, remainder = _round(batch.mean, args.x)
    scale = _times(_invstd(batch.var, args.eps), args.weight)
    shift = -remainder * scale
    return _narrow(
        args.x, centre, scale, shift if args.bias is None else as_wide(args.bias) + shift
    )


def finish(args: NormArgs, coefficients: Sequence[Array], /) -> Array:
    """The output by `output_coefficients`, after the residual and the ReLU."""
    x = masked(args.x, args.mask)
    xp = array_namespace(x)
    centre, scale, shift = (per_channel(v, x, args.axis) for v in coefficients)
    # Not in place: vmap may give `shift` a batch that the product lacks.
    y = (xp.astype(x, centre.dtype, copy=False) - centre) * scale + shift
    y = xp.astype(y, x.dtype, copy=False)
    y = y if args.residual is None else y + args.residual
    return masked(_where(~(y <= 0), y) if args.relu else y, args.mask)  # NaN stays


def gradient_coefficients(g: Gradient, summed: Array, /) -> tuple[Array, ...]:
    """The numbers of each channel in `dx = (x - centre) * x_scale + dy * dy_scale + shift`.

    The gradient is `weight * invstd * (dy - element_weight * (sum_dy + xhat * sum_dy_xhat))`, where
    `invstd = 1 / sqrt(var + eps)` and `xhat = (x - mean) * invstd`.
    """
    mean = g.batch.mean
    sum_dy, sum_dy_xhat = split_sums(_like(summed, mean), mean.shape)
    centre, remainder = _round(mean, g.input.x)
    invstd = _invstd(g.batch.var, g.input.eps)
    dy_scale = _times(invstd, g.input.weight)
    pull = -dy_scale * g.batch.element_weight
    x_scale = pull * invstd * sum_dy_xhat
    shift = pull * sum_dy - remainder * x_scale
    return _narrow(g.input.x, centre, x_scale, dy_scale, shift)


def finish_gradient(g: Gradient, coefficients: Sequence[Array], /) -> Array:
    """The gradient of `x` by `gradient_coefficients`."""
    g = _before_relu(g)
    x = g.input.x
    xp = array_namespace(x)
    centre, x_scale, dy_scale, shift = (per_channel(v, x, g.input.axis) for v in coefficients)
    dx = (xp.astype(x, centre.dtype, copy=False) - centre) * x_scale
    dx += xp.astype(g.dy, centre.dtype, copy=False) * dy_scale
    dx += shift
    return masked(xp.astype(dx, x.dtype, copy=False), g.input.mask)


def about(args: NormArgs, mean: Array, /) -> tuple[NormArgs, Array]:
    """The input less a mean, for its moments only; and the mean as it was taken away, wide."""
    xp, (centre,) = array_namespace(args.x), _narrow(args.x, mean)
    x = xp.astype(args.x, centre.dtype, copy=False) - per_channel(centre, args.x, args.axis)
    return args._replace(x=x, residual=None, relu=False, running=None), as_wide(centre)


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
    n = at_least_one(math.prod(x.shape[i] for i in axis) if mask is None else count)
    (centre,) = _narrow(x, _sum(x, axis) / n)
    d = masked(x - per_channel(centre, x, axis), mask)
    first, second = _sum(d, axis) / n, _sum(d * d, axis) / n
    return as_wide(centre) + first, xp.clip(second - first * first, 0.0, None)


def pack(
    mean: Array, meansqr: Array, weight: Array, count: Array, mark: float = wire.NO_MARK, /
) -> Array:
    """A layer's forward payload, see `multibn.wire`."""
    xp = array_namespace(mean)
    moments = [weight * mean, weight * meansqr]
    is_finite = moments[1] < wire.LARGEST  # not a NaN
    moments = [xp.where(is_finite, v, xp.full_like(v, mark)) for v in moments]
    numbers = [
        xp.reshape(xp.asarray(v, dtype=mean.dtype, device=device(mean)), (1,))
        for v in (weight, count)  # arrays, where a mask is on a GPU
    ]
    return wire.concat([*moments, *numbers])


def _unpack(
    args: NormArgs, summed: Array, rank_weight: float | Array, count: float | Array, /
) -> tuple[BatchStatistics, int]:
    """The statistics in the sum of all ranks' payloads, and the state of the message."""
    summed, shape = _like(summed, args.x), channels(args.x.shape, args.axis)
    xp, found = array_namespace(summed), state(summed, count)
    if found == NOT_FINITE:  # squares of marks overflow
        is_finite = xp.abs(as_wide(summed)) < wire.LARGEST_SUM
        summed = xp.where(is_finite, summed, xp.full_like(summed, math.nan))
    C = math.prod(shape)
    meansqr = summed[C : 2 * C]
    total_weight, total = (
        xp.reshape(values(summed[2 * C + at]), (-1,))[0]  # the same in all of a batch of vmap
        for at in (wire.WEIGHT, wire.COUNT)
    )
    divisor = xp.where(total_weight == 0.0, xp.ones_like(total_weight), total_weight)
    mean = summed[:C] / divisor
    var = xp.clip(meansqr / divisor - mean * mean, 0.0, None)
    if found == OK and _is_readable(var):
        least = LEAST_SHARES[args.x.dtype != array_namespace(args.x).float64]
        found = CANCELLED if bool(xp.any(values(mean * mean * least > var + args.eps))) else OK
    element_weight = rank_weight / (at_least_one(count) * divisor)
    batch = BatchStatistics(xp.reshape(mean, shape), xp.reshape(var, shape), total, element_weight)
    if not is_on_host(summed) and not is_abstract(summed):  # where nobody looks at the state
        gap = xp.where(_is_finite(summed), xp.zeros_like(total), xp.full_like(total, math.nan))
        batch = skipped(batch, gap)
    return batch, found


def skipped(batch: BatchStatistics, gap: float | Array = math.nan, /) -> BatchStatistics:
    """The statistics where a batch is not finite: NaN, and a count of 0, by which nothing moves.

    `gap` is 0 where the batch is finite; the result is `batch` then.
    """
    xp, count = array_namespace(batch.mean), batch.count
    kept = xp.where(count + gap == count, count, xp.zeros_like(count))
    return batch._replace(mean=batch.mean + gap, var=batch.var + gap, count=kept)


def state(summed: Array, count: float | Array, /) -> int:
    """The fault of the sum of all ranks' payloads, or `OK`; `count` as in `finish_forward`."""
    if is_abstract(summed):
        return OK
    xp = array_namespace(summed)
    total = xp.reshape(values(summed[-1]), (-1,))[0]
    if _is_readable(summed):
        if bool(xp.isnan(total)):
            return REFUSED
        if not bool(_is_finite(values(summed))):
            return NOT_FINITE
    # Every rank has at most one value if all have one together: only then is the count read. A
    # count of a mask on a GPU is never read.
    return ONE_VALUE if isinstance(count, float) and count <= 1 and bool(total == 1) else OK


def _is_finite(summed: Array) -> Array:
    """Whether no rank has sent its mark."""
    xp, summed = array_namespace(summed), as_wide(summed)
    return xp.all(xp.abs(summed[..., :-2]) < wire.LARGEST_SUM)


def _is_readable(v: Array) -> bool:
    """Whether the host may look at numbers now."""
    return is_on_host(v) and not (is_traced(v) or is_abstract(v))


def split_sums(summed: Array, shape: tuple[int, ...], /) -> list[Array]:
    """The sums of `dy` and of `dy * xhat` in a backward payload, as per-channel arrays."""
    C, xp = math.prod(shape), array_namespace(summed)
    return [xp.reshape(v, shape) for v in (summed[:C], summed[C : 2 * C])]


def parameter_gradients(
    payload: Array, g: Gradient, /, *, divisor: float = 1.0
) -> tuple[Array | None, Array | None]:
    """The gradients of weight and bias in a backward payload, divided by `divisor`."""

    def gradient(v: Array, parameter: Array | None) -> Array | None:
        if parameter is None:
            return None
        v = array_namespace(parameter).astype(v / divisor, parameter.dtype, copy=False)
        return to_device(v, device(parameter))

    sum_dy, sum_dy_xhat = split_sums(payload, g.batch.mean.shape)
    return gradient(sum_dy_xhat, g.input.weight), gradient(sum_dy, g.input.bias)


def update_running(
    running: Running, mean: Array, var: Array, count: Array, local_count: Array, /
) -> None:
    """Move running statistics in place by those of a batch, and count the batch.

    Nothing changes if `count`, the elements per channel over all ranks, is 0.
    """
    xp, momentum, num_batches = array_namespace(mean), running.momentum, running.num_batches
    total = float(count) if _is_readable(count) else count
    moves: Any = total > 0
    if moves is False:
        return
    if num_batches is not None:
        num_batches += moves
        if momentum is None:
            momentum = 1.0 / xp.clip(as_wide(num_batches), 1.0, None)
    if not isinstance(moves, bool):
        moves = as_wide(moves)  # a bool times a number is of torch's default dtype
    share = (momentum or 0.0 if isinstance(momentum, float | None) else momentum) * moves
    factor = variance_factor(total, local_count, running.convention)
    for old, new in ((running.mean, mean), (running.var, var * factor)):
        # `old + share * (new - old)` would keep rounding errors of `old` at momentum 1.
        wide = (1 - share) * as_wide(old) + share * xp.reshape(new, old.shape)
        if hasattr(share, "dtype"):  # 0 for a batch that is skipped, whose statistics are NaN
            wide = xp.where(share == 0, as_wide(old), wide)
        old[...] = to_device(xp.astype(wide, old.dtype, copy=False), device(old))


def variance_factor(
    count: float | Array, local_count: float | Array, convention: RunningVar, /
) -> float | Array:
    """The factor of the biased variance, see `multibn.engine.running_variance`."""
    if convention != "unbiased_global":
        check_choice("running_var", convention, RunningVar)
        if convention == "biased":
            return 1.0
        if hasattr(local_count, "dtype"):
            xp = array_namespace(local_count)
            count = xp.where(local_count > 0, local_count, 0.0 * local_count + count)
        else:
            count = local_count or count
    return count / at_least_one(count - 1)


def _before_relu(g: Gradient) -> Gradient:
    """The gradient before a ReLU, with zeros for the elements that do not count."""
    args = g.input._replace(x=masked(g.input.x, g.input.mask), residual=None, running=None)
    dy = g.dy
    if args.relu:
        dy = rectified(dy, normalize(args._replace(relu=False), g.batch) if g.y is None else g.y)
    return g._replace(dy=masked(dy, args.mask), input=args)


def _like(summed: Array, x: Array) -> Array:
    """A sum in the library of `x`, in memory that is not a channel's."""
    xp = array_namespace(x)  # torch's asarray would take the default device, which may be a GPU
    of_host = getattr(xp, "from_numpy", xp.asarray)
    return of_host(summed.copy()) if type(summed) is np.ndarray else summed


def _written(payload: Array, out: Any) -> Array:
    """The payload, or `out` with the payload in it."""
    if out is None:
        return payload
    if isinstance(out, wire.Message):
        return out.write(payload)
    out[:] = to_host(payload)
    return out


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
    """The array `v` of channels in float64; in host memory if its device has no float64."""
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
    """Arrays of channels in the arithmetic dtype of `x`, on its device."""
    xp = array_namespace(x)
    dtype = arithmetic_dtype(xp, x.dtype)
    return tuple(to_device(xp.astype(v, dtype, copy=False), device(x)) for v in values)
