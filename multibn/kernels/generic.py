"""The verbs in the array API standard: the reference, for any library.

A layer's pass is two halves each way, with the message between: `begin_forward` gives the numbers
that the rank sends, `finish_forward` takes their sum; `begin_backward` and `finish_backward` the
same for the gradients. `normalize` is the pass by known statistics. All else here is what the verbs
are made of.

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
import sys
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import is_torch_namespace, to_device

from multibn import message
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

# What `finish_forward` says of a message. On a GPU, where reading would wait, the sum is taken to
# be right, but for `ONE_VALUE` where this rank has at most one value per channel.
RIGHT, REFUSED, NOT_FINITE, ONE_VALUE = 0, 1, 2, 3


class Running(NamedTuple):
    """Running statistics, which `finish_forward` moves in place.

    Attributes
    ----------
    mean, var
        As many numbers as there are channels, in any shape and floating-point dtype.
    momentum
        The weight of the batch; None for 1/n at the n-th batch, which needs `num_batches`.
    convention
        Which variance goes into `var`, see `multibn.running_variance`.
    num_batches
        A counter of shape `()`, or None where nothing is to be counted.
    """

    mean: Array
    var: Array
    momentum: float | None
    convention: RunningVar = "unbiased_global"
    num_batches: Array | None = None


# y, mean, var, count over all ranks, element_weight (see `multibn.BatchStatistics`), and the state.
Finished: TypeAlias = tuple[Array, Array, Array, Array, Array, int]


def begin_forward(
    x: Array,
    rank_weight: float | Array,
    count: float | Array,
    /,
    *,
    axis: tuple[int, ...],
    mask: Array | None = None,
    out: Array | None = None,
    passes: Any = None,
) -> Array:
    """This rank's numbers for the forward message: a layer's payload, see `multibn.message`.

    Parameters
    ----------
    x
        The activation; may be empty.
    rank_weight, count
        What this rank counts for, and its elements per channel, those of the mask only if there is
        one; with a mask on a GPU, arrays of shape `()`.
    mask
        Booleans that broadcast against `x`, the same for all channels: elements where the mask is
        False take no part, whatever they hold.
    out
        A float64 vector in host memory (of NumPy, for activations of any library) that gets the
        payload and is returned.
    passes
        A module whose `local_moments`, `normalize`, `backward_sums` and `input_gradient` take the
        place of this file's, for a file that has no verbs of its own; not read with a mask.
    """
    masked = {} if mask is None else {"mask": mask, "count": count}
    mean, var = _passes(passes, mask).local_moments(x, axis=axis, **masked)
    return pack(mean, var + mean * mean, rank_weight, count, out=out)


def finish_forward(
    summed: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    rank_weight: float | Array,
    count: float | Array,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
    mask: Array | None = None,
    running: Running | None = None,
    passes: Any = None,
) -> Finished:
    """Normalize `x` by the sum of all ranks' payloads, and move the running statistics.

    Returns `y, mean, var, count, element_weight, state`: the activation's output, the statistics
    of the whole batch, and `RIGHT`, or what is wrong with the message. In the latter case the
    running statistics stay as they are, and `y` may be anything.

    Parameters
    ----------
    summed
        The sum, on the device of `x` or in host memory. Not kept: the memory may be the line's.
    x, rank_weight, count, mask
        As in `begin_forward`. The output is 0 where the mask is False.
    weight, bias, eps
        Of the normalization, see `normalize`.
    residual, relu
        Added to the output, an array like `x`; whether ReLU comes last.
    running
        Moved in place, unless all ranks were empty.
    passes
        As in `begin_forward`.
    """
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    mean, var, total, element_weight, state = unpack(_like(summed, x), shape, rank_weight, count)
    options: dict[str, Any] = {"eps": eps, "axis": axis, "residual": residual, "relu": relu}
    y = _passes(passes, mask).normalize(masked(x, mask), mean, var, weight, bias, **options)
    if running is not None and state == RIGHT:
        move(running, mean, var, total, count)
    return masked(y, mask), mean, var, total, element_weight, state


def begin_backward(
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    mask: Array | None = None,
    out: Array | None = None,
    passes: Any = None,
) -> tuple[Array, Array | None, Array | None]:
    """This rank's numbers for the backward message, and the gradients of weight and bias.

    The payload has the sums over `axis` of `dy` and of `dy * xhat`, where
    `xhat = (x - mean) / sqrt(var + eps)`. The gradients are the same numbers in memory of their own
    and in the dtypes of `weight` and `bias`, None where a parameter is.

    Parameters
    ----------
    dy
        Gradient of the output of `finish_forward`, of the shape of `x`.
    x, mean, var, weight, bias, eps, axis, mask
        As in and from the forward pass.
    relu
        Whether the forward pass ended in ReLU: `dy` is then taken for 0 where the output was not
        positive.
    y
        The output, if there was a residual before the ReLU. Without a residual the output's sign is
        computed from `x`, by exactly the arithmetic of the forward pass.
    out, passes
        As in `begin_forward`.
    """
    k, x = _passes(passes, mask), masked(x, mask)
    dy = _before_relu(k, dy, x, mean, var, weight, bias, eps=eps, axis=axis, relu=relu, y=y)
    dy = masked(dy, mask)
    payload = message.concat(k.backward_sums(dy, x, mean, var, eps=eps, axis=axis))
    gradients = parameter_gradients(payload, mean.shape, weight, bias)
    if out is not None:
        out[:] = to_host(payload)
    return payload if out is None else out, *gradients


def finish_backward(
    summed: Array,
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    element_weight: Array,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    mask: Array | None = None,
    passes: Any = None,
) -> tuple[Array, Array | None]:
    """The gradients of `x` and, if `y` is passed, of the residual before the ReLU.

    Parameters
    ----------
    summed
        The sum of all ranks' payloads, as in `finish_forward`.
    element_weight
        From `finish_forward`.
    dy, x, mean, var, weight, bias, eps, axis, relu, y, mask, passes
        As in `begin_backward`. The gradients are 0 where the mask is False.
    """
    k, x = _passes(passes, mask), masked(x, mask)
    dy = _before_relu(k, dy, x, mean, var, weight, bias, eps=eps, axis=axis, relu=relu, y=y)
    dy = masked(dy, mask)
    sums = split_sums(_like(summed, mean), mean.shape)
    statistics = mean, var, weight, element_weight, *sums
    dx = k.input_gradient(dy, x, *statistics, eps=eps, axis=axis)
    return masked(dx, mask), None if y is None else dy


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
    centre, remainder = _round(mean, dtype)
    scale = _times(_invstd(var, eps), weight)
    shift = -remainder * scale if bias is None else as_wide(bias) - remainder * scale
    d = xp.astype(x, dtype, copy=False) - _per_channel(centre, x, axis)
    y = d * _per_channel(scale, x, axis, dtype)
    # Not in place: vmap may give `shift` a batch that `y` lacks.
    y = xp.astype(y + _per_channel(shift, x, axis, dtype), x.dtype, copy=False)
    if residual is not None:
        y = y + residual
    return _where(~(y <= 0), y) if relu else y  # NaN stays


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


def pack(
    mean: Array, meansqr: Array, weight: Array, count: Array, /, *, out: Array | None = None
) -> Array:
    """A layer's forward payload, see `multibn.message`: a new vector, or `out`."""
    xp = array_namespace(mean)
    numbers = [
        xp.reshape(v, (1,))
        if hasattr(v, "dtype")
        else xp.full((1,), v, dtype=mean.dtype, device=device(mean))
        for v in (weight, count)
    ]
    packed = message.concat([weight * mean, weight * meansqr, *numbers])
    if out is None:
        return packed
    out[:] = to_host(packed)
    return out


def unpack(
    summed: Array, shape: tuple[int, ...], rank_weight: Array, count: Array, /
) -> tuple[Array, Array, Array, Array, int]:
    """The statistics in the sum of all ranks' payloads, and the state of the message.

    The results are those of `finish_forward`; per-channel arrays get `shape`.
    """
    xp = array_namespace(summed)
    C = math.prod(shape)
    meansqr = summed[C : 2 * C]
    total_weight, total = (
        xp.reshape(values(summed[2 * C + i]), (-1,))[0]  # the same in all of a batch of vmap
        for i in (message.WEIGHT, message.COUNT)
    )
    divisor = xp.where(total_weight == 0.0, xp.ones_like(total_weight), total_weight)
    mean = summed[:C] / divisor
    return (
        xp.reshape(mean, shape),
        xp.reshape(xp.clip(meansqr / divisor - mean * mean, 0.0, None), shape),
        total,
        rank_weight / (at_least_one(count) * divisor),
        state(summed, count),
    )


def state(summed: Array, count: float | Array, /) -> int:
    """What is wrong with the sum of all ranks' payloads, or `RIGHT`; `count` as in `unpack`."""
    if is_abstract(summed):
        return RIGHT
    xp = array_namespace(summed)
    total = xp.reshape(values(summed[-1]), (-1,))[0]
    if is_on_host(summed) and not is_traced(summed):
        if bool(xp.isnan(total)):
            return REFUSED
        if not bool(xp.all(xp.isfinite(values(xp.sum(summed[:-2]))))):
            return NOT_FINITE
    # Every rank has at most one value if all have one together: only then is the count read. A
    # count of a mask on a GPU is never read.
    return ONE_VALUE if isinstance(count, float) and count <= 1 and bool(total == 1) else RIGHT


def split_sums(summed: Array, shape: tuple[int, ...], /) -> list[Array]:
    """The sums of `dy` and of `dy * xhat` in a backward payload, as per-channel arrays."""
    C, xp = math.prod(shape), array_namespace(summed)
    return [xp.reshape(v, shape) for v in message.split(summed, (C, C))]


def parameter_gradients(
    payload: Array,
    shape: tuple[int, ...],
    weight: Array | None,
    bias: Array | None,
    divisor: float = 1.0,
) -> tuple[Array | None, Array | None]:
    """The gradients of weight and bias in a backward payload, divided by `divisor`."""
    gradients = []
    for v, p in zip(split_sums(payload, shape), (bias, weight), strict=True):
        if p is not None:
            xp = array_namespace(p)
            v = xp.astype(v / divisor, p.dtype, copy=False)
            v = to_device(v, device(p))
        gradients.append(None if p is None else v)
    dbias, dweight = gradients
    return dweight, dbias


def move(running: Running, mean: Array, var: Array, count: Array, local_count: Array, /) -> None:
    """Move running statistics in place by those of a batch, and count the batch.

    Nothing changes if `count`, the elements per channel over all ranks, is 0.
    """
    old_mean, old_var, momentum, convention, num_batches = running
    readable = is_on_host(count) and not (is_traced(count) or is_abstract(count))
    total = float(count) if readable else count
    moves: Any = total > 0
    if num_batches is not None:
        num_batches += moves
        if momentum is None:
            momentum = 1.0 / array_namespace(mean).clip(as_wide(num_batches), 1.0, None)
    if not isinstance(moves, bool):
        moves = as_wide(moves)  # a bool times a number is of torch's default dtype
    moved = move_averages(
        old_mean,
        old_var,
        array_namespace(mean).reshape(mean, old_mean.shape),
        array_namespace(var).reshape(var, old_var.shape),
        (momentum or 0.0 if isinstance(momentum, float | None) else momentum) * moves,
        variance_factor(total, local_count, convention),
    )
    old_mean[...], old_var[...] = moved


def variance_factor(
    count: float | Array, local_count: float | Array, convention: RunningVar, /
) -> float | Array:
    """What the biased variance is multiplied by, see `multibn.running_variance`."""
    if convention != "unbiased_global":
        check_choice("running_var", convention, RunningVar)
        if convention == "biased":
            return 1.0
        count = local_count
    return count / at_least_one(count - 1)


def at_least_one(count: float | Array, /) -> float | Array:
    """`count`, or 1 if that is larger: a divisor."""
    if hasattr(count, "dtype"):
        return array_namespace(count).clip(count, 1.0, None)
    return max(count, 1.0)  # a number, or torch.compile's symbol for one


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


def arithmetic_dtype(xp: Any, dtype: Any) -> Any:
    return xp.float32 if xp.finfo(dtype).bits < 32 else dtype


def masked(x: Array, mask: Array | None, /) -> Array:
    """`x`, and 0 where the mask is False."""
    return x if mask is None else _where(mask, x)


def _where(condition: Array, x: Array) -> Array:
    """`x`, and 0 where the condition is False."""
    xp = array_namespace(x)
    return xp.where(condition, x, xp.zeros((), dtype=x.dtype, device=device(x)))


def _before_relu(
    k: Any, dy: Array, x: Array, *statistics: Any, relu: bool, y: Array | None, **on: Any
) -> Array:
    """The gradient before a ReLU whose output was `y`, or, if that is None, is computed."""
    if not relu:
        return dy
    return rectified(dy, k.normalize(x, *statistics, **on) if y is None else y)


def rectified(dy: Array, y: Array, /) -> Array:
    """The gradient before a ReLU whose output was `y`."""
    return _where(y > 0, dy)


def _passes(passes: Any, mask: Array | None) -> Any:
    return sys.modules[__name__] if passes is None or mask is not None else passes


def _like(summed: Array, x: Array) -> Array:
    """A sum in the library of `x`, in memory that is not a line's."""
    return array_namespace(x).asarray(summed.copy()) if type(summed) is np.ndarray else summed


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
