"""The verbs in the array API standard: the reference, for any library.

A layer's pass is two halves each way, with the message between: `begin_forward` gives the numbers
that the rank sends, `finish_forward` takes their sum; `begin_backward` and `finish_backward` the
same for the gradients. `normalize` is the pass by known statistics. `arguments` describes what the
verbs take. All else here are the steps between an activation and a message; `generic_passes` has
the passes over activations.
"""

import math
from typing import Any

import numpy as np
from array_api_compat import to_device

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
from multibn.kernels import generic_passes
from multibn.kernels.arguments import (
    LEAST_SHARES,
    LOST,
    NOT_FINITE,
    ONE_VALUE,
    REFUSED,
    RIGHT,
    BatchStatistics,
    Gradient,
    Input,
    Running,
)
from multibn.kernels.generic_passes import as_wide as as_wide
from multibn.kernels.generic_passes import at_least_one as at_least_one
from multibn.kernels.generic_passes import masked as masked
from multibn.kernels.generic_passes import rectified
from multibn.kernels.layout import channels


def begin_forward(
    i: Input, rank_weight: float | Array, count: float | Array, /, *, out: Any = None
) -> Array:
    """This rank's numbers for the forward message: a layer's payload, see `multibn.message`.

    `rank_weight` is what this rank counts for, `count` its elements per channel, those of the mask
    only if there is one; with a mask on a GPU, both are arrays of shape `()`. `out` gets the
    payload and is returned: a `message.Message`, or a float64 vector of NumPy's.
    """
    mean, var = generic_passes.local_moments(i.x, i.axis, i.mask, count)
    return pack(mean, var + mean * mean, rank_weight, count, out=out)


def finish_forward(
    i: Input, summed: Array, rank_weight: float | Array, count: float | Array, /
) -> tuple[Array, BatchStatistics, int]:
    """Normalize by the sum of all ranks' payloads, and move the running statistics.

    Returns the output, the statistics of the whole batch, and `RIGHT`, or what is wrong with the
    message: the running statistics then stay as they are, and the output may be anything. `summed`
    is on the device of `x` or in host memory, and is not kept: the memory may be the line's.
    """
    batch, state = unpack_for(i, summed, rank_weight, count)
    y = normalize(i, batch)
    if i.running is not None and state == RIGHT:
        move(i.running, *batch[:3], count)
    return y, batch, state


def normalize(i: Input, batch: BatchStatistics, /) -> Array:
    """The output by known statistics, in the dtype of `x`. No running statistics are moved."""
    return finish(i, generic_passes.output_coefficients(i, batch))


def finish(i: Input, coefficients: Any, /) -> Array:
    """The output by the coefficients of `generic_passes.output_coefficients`."""
    return masked(generic_passes.finish(i._replace(x=masked(i.x, i.mask)), coefficients), i.mask)


def begin_backward(g: Gradient, /, *, out: Any = None) -> tuple[Array, Array | None, Array | None]:
    """This rank's numbers for the backward message, and the gradients of weight and bias.

    The payload has the sums over `axis` of `dy` and of `dy * xhat`, where
    `xhat = (x - mean) / sqrt(var + eps)`. The gradients are the same numbers in memory of their own
    and in the dtypes of `weight` and `bias`, None where a parameter is. `out` is as in
    `begin_forward`.
    """
    payload = message.concat(generic_passes.backward_sums(_before_relu(g)))
    return _written(payload, out), *parameter_gradients(payload, g)


def finish_backward(g: Gradient, summed: Array, /) -> tuple[Array, Array | None]:
    """The gradients of `x` and, if `y` is passed, of the residual before the ReLU.

    `summed` is the sum of all ranks' payloads, as in `finish_forward`.
    """
    before = _before_relu(g)
    coefficients = generic_passes.gradient_coefficients(g, sums_for(g, summed))
    dx = generic_passes.finish_gradient(before, coefficients)
    return masked(dx, g.input.mask), None if g.y is None else before.dy


def finish_gradient(g: Gradient, coefficients: Any, /) -> Array:
    """The gradient of `x` by those of `generic_passes.gradient_coefficients`; no ReLU came last."""
    dx = generic_passes.finish_gradient(_before_relu(g), coefficients)
    return masked(dx, g.input.mask)


def residual_gradient(g: Gradient, /) -> Array:
    """The gradient of a residual, where `finish_backward` has not made it in its own pass."""
    return masked(g.dy, g.input.mask) if g.y is None else rectified(g.dy, g.y)


def unpack_for(
    i: Input, summed: Array, rank_weight: float | Array, count: float | Array, /
) -> tuple[BatchStatistics, int]:
    """`unpack` for the arguments of `finish_forward`; the state may be `LOST`."""
    batch, state = unpack(_like(summed, i.x), channels(i.x.shape, i.axis), rank_weight, count)
    mean, var, *_ = batch
    if state == RIGHT and is_on_host(var) and not (is_traced(var) or is_abstract(var)):
        xp = array_namespace(var)
        least = LEAST_SHARES[i.x.dtype != array_namespace(i.x).float64]
        is_lost = values(mean * mean * least > var + i.eps)
        state = LOST if bool(xp.any(is_lost)) else RIGHT
    return batch, state


def sums_for(g: Gradient, summed: Array, /) -> list[Array]:
    """`split_sums` for the arguments of `finish_backward`."""
    return split_sums(_like(summed, g.batch.mean), g.batch.mean.shape)


def pack(
    mean: Array, meansqr: Array, weight: Array, count: Array, /, *, out: Array | None = None
) -> Array:
    """A layer's forward payload, see `multibn.message`: a new vector, or `out`."""
    xp = array_namespace(mean)
    numbers = [
        xp.reshape(xp.asarray(v, dtype=mean.dtype, device=device(mean)), (1,))
        for v in (weight, count)  # arrays, where a mask is on a GPU
    ]
    return _written(message.concat([weight * mean, weight * meansqr, *numbers]), out)


def unpack(
    summed: Array, shape: tuple[int, ...], rank_weight: Array, count: Array, /
) -> tuple[BatchStatistics, int]:
    """The statistics in the sum of all ranks' payloads, and the state of the message.

    Per-channel arrays get `shape`.
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
    var = xp.clip(meansqr / divisor - mean * mean, 0.0, None)
    element_weight = rank_weight / (at_least_one(count) * divisor)
    batch = BatchStatistics(xp.reshape(mean, shape), xp.reshape(var, shape), total, element_weight)
    if not is_on_host(summed) and not is_abstract(summed):  # where nobody looks at the state
        all_of_it = xp.sum(summed[: 2 * C])
        batch = skipped(batch, all_of_it - all_of_it)
    return batch, state(summed, count)


def skipped(batch: BatchStatistics, gap: float | Array = math.nan, /) -> BatchStatistics:
    """The statistics where a batch is not finite: NaN, and a count of 0, by which nothing moves.

    `gap` is 0 where the batch is finite; the result is `batch` then.
    """
    xp, count = array_namespace(batch.mean), batch.count
    kept = xp.where(count + gap == count, count, xp.zeros_like(count))
    return batch._replace(mean=batch.mean + gap, var=batch.var + gap, count=kept)


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


def has_no_element(summed: Array, /) -> bool:
    """Whether no element of all ranks counts, as far as the host may ask."""
    if not is_on_host(summed) or is_traced(summed) or is_abstract(summed):
        return False
    return not bool(array_namespace(summed).any(values(summed[-1:]) > 0))


def split_sums(summed: Array, shape: tuple[int, ...], /) -> list[Array]:
    """The sums of `dy` and of `dy * xhat` in a backward payload, as per-channel arrays."""
    C, xp = math.prod(shape), array_namespace(summed)
    return [xp.reshape(v, shape) for v in message.split(summed, (C, C))]


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


def move(running: Running, mean: Array, var: Array, count: Array, local_count: Array, /) -> None:
    """Move running statistics in place by those of a batch, and count the batch.

    Nothing changes if `count`, the elements per channel over all ranks, is 0.
    """
    xp, momentum, num_batches = array_namespace(mean), running.momentum, running.num_batches
    readable = is_on_host(count) and not (is_traced(count) or is_abstract(count))
    total = float(count) if readable else count
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
    pairs = (running.mean, mean), (running.var, var * factor)
    moved = [average(old, xp.reshape(new, old.shape), share) for old, new in pairs]
    running.mean[...], running.var[...] = moved


def average(old: Array, new: Array, momentum: float | Array, /) -> Array:
    """A running statistic after a batch: a new array `old + momentum * (new - old)`."""
    xp = array_namespace(old)
    # The formula above would keep rounding errors of `old` at momentum 1.
    wide = (1 - momentum) * as_wide(old) + momentum * new
    if hasattr(momentum, "dtype"):  # 0 for a batch that is skipped, whose statistics are NaN
        wide = xp.where(momentum == 0, as_wide(old), wide)
    return to_device(xp.astype(wide, old.dtype, copy=False), device(old))


def variance_factor(
    count: float | Array, local_count: float | Array, convention: RunningVar, /
) -> float | Array:
    """What the biased variance is multiplied by, see `multibn.engine.running_variance`."""
    if convention != "unbiased_global":
        check_choice("running_var", convention, RunningVar)
        if convention == "biased":
            return 1.0
        count = local_count
    return count / at_least_one(count - 1)


def _before_relu(g: Gradient) -> Gradient:
    """The gradient before a ReLU, with zeros for the elements that do not count."""
    i = g.input._replace(x=masked(g.input.x, g.input.mask), residual=None, running=None)
    dy = g.dy
    if i.relu:
        dy = rectified(dy, normalize(i._replace(relu=False), g.batch) if g.y is None else g.y)
    return g._replace(dy=masked(dy, i.mask), input=i)


def _like(summed: Array, x: Array) -> Array:
    """A sum in the library of `x`, in memory that is not a line's."""
    return array_namespace(x).asarray(summed.copy()) if type(summed) is np.ndarray else summed


def _written(payload: Array, out: Any) -> Array:
    """The payload, or `out` with the payload in it."""
    if out is None:
        return payload
    if isinstance(out, message.Message):
        return out.write(payload)
    out[:] = to_host(payload)
    return out
