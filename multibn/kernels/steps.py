"""The steps between an activation and a message, on the numbers of channels: the reference.

Per-channel arrays are float64 ("wide", see `as_wide`). Only weight, bias and running statistics may
have any floating-point dtype. `reference` has the passes over activations.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import is_torch_namespace, to_device

from multibn import wire
from multibn._arrays import array_namespace, device, is_abstract, is_on_host, is_traced, values
from multibn._typing import Array, RunningVar, check_choice
from multibn.kernels.layout import channels
from multibn.kernels.spec import (
    CANCELLED,
    MIN_RELATIVE_VARIANCE,
    NOT_FINITE,
    OK,
    ONE_VALUE,
    BatchStatistics,
    Gradient,
    NormArgs,
    Running,
)
from multibn.kernels.spec import split_sums as split_sums


def pack(
    mean: Array, meansqr: Array, weight: Array, count: Array, mark: float = wire.NO_BIT, /
) -> Array:
    """Return a layer's forward payload, see `multibn.wire`."""
    xp = array_namespace(mean)
    moments = [weight * mean, weight * meansqr]
    is_finite = moments[1] < wire.LARGEST  # not a NaN
    moments = [xp.where(is_finite, v, xp.full_like(v, mark)) for v in moments]
    numbers = [
        xp.reshape(xp.asarray(v, dtype=mean.dtype, device=device(mean)), (1,))
        for v in (weight, count)  # arrays if a mask is on a GPU
    ]
    return wire.concat([*moments, *numbers])


def statistics_of(
    args: NormArgs, summed: Array, rank_weight: float | Array, count: float | Array, /
) -> tuple[BatchStatistics, int]:
    """Return the statistics from the sum of all ranks' payloads, and the state of the message."""
    summed, shape = sum_like(summed, args.x), channels(args.x.shape, args.axis)
    xp, found = array_namespace(summed), state_of(summed, count)
    if found == NOT_FINITE:  # squares of marks overflow
        is_finite = xp.abs(as_wide(summed)) < wire.LARGEST_SUM
        summed = xp.where(is_finite, summed, xp.full_like(summed, math.nan))
    C = math.prod(shape)
    total_weight, total = (
        xp.reshape(values(summed[2 * C + at]), (-1,))[0]  # equal in all of vmap's batch
        for at in (wire.WEIGHT, wire.COUNT)
    )
    divisor = xp.where(total_weight == 0.0, xp.ones_like(total_weight), total_weight)
    mean, meansqr = (v / divisor for v in split_sums(summed, shape))
    var = xp.clip(meansqr - mean * mean, 0.0, None)
    if found == OK and _is_readable(var):
        least = MIN_RELATIVE_VARIANCE[args.x.dtype != array_namespace(args.x).float64]
        found = CANCELLED if bool(xp.any(values(mean * mean * least > var + args.eps))) else OK
    element_weight = rank_weight / (at_least_one(count) * divisor)
    batch = BatchStatistics(mean, var, total, element_weight)
    if not is_on_host(summed) and not is_abstract(summed):  # the state was not read
        gap = xp.where(_is_finite(summed), xp.zeros_like(total), xp.full_like(total, math.nan))
        batch = skipped(batch, gap)
    return batch, found


def skipped(batch: BatchStatistics, gap: float | Array = math.nan, /) -> BatchStatistics:
    """Return the statistics of a skipped batch: NaN, and a count of 0, so that nothing is updated.

    If `gap` is 0, which means that the batch is finite, the result is `batch`.
    """
    xp, count = array_namespace(batch.mean), batch.count
    kept = xp.where(count + gap == count, count, xp.zeros_like(count))
    return batch._replace(mean=batch.mean + gap, var=batch.var + gap, count=kept)


def state_of(summed: Array, count: float | Array, /) -> int:
    """Return the state of the sum of all ranks' payloads; `count` is as in `finish_forward`."""
    if is_abstract(summed):
        return OK
    xp = array_namespace(summed)
    total = xp.reshape(values(summed[-1]), (-1,))[0]
    if _is_readable(summed) and not bool(_is_finite(values(summed))):
        return NOT_FINITE
    # If the ranks together have one value, this rank has at most one. So the total is read only if
    # `count` is at most 1. If a mask is on a GPU, `count` is an array, and nothing is read.
    return ONE_VALUE if isinstance(count, float) and count <= 1 and bool(total == 1) else OK


def _is_finite(summed: Array) -> Array:
    """Return whether no rank has sent its mark."""
    xp, summed = array_namespace(summed), as_wide(summed)
    return xp.all(xp.abs(summed[..., :-2]) < wire.LARGEST_SUM)


def _is_readable(v: Array) -> bool:
    """Return whether values can be read without synchronizing or tracing."""
    return is_on_host(v) and not (is_traced(v) or is_abstract(v))


def parameter_gradients(
    payload: Array, g: Gradient, /, *, divisor: float = 1.0
) -> tuple[Array | None, Array | None]:
    """Return the gradients of weight and bias in a backward payload, divided by `divisor`."""

    def gradient(v: Array, parameter: Array | None) -> Array | None:
        if parameter is None:
            return None
        v = array_namespace(parameter).astype(v / divisor, parameter.dtype, copy=False)
        return to_device(v, device(parameter))

    sum_dy, sum_dy_xhat = split_sums(payload, g.batch.shape)
    return gradient(sum_dy_xhat, g.input.weight), gradient(sum_dy, g.input.bias)


def update_running(
    running: Running, mean: Array, var: Array, count: Array, local_count: Array, /
) -> None:
    """Update running statistics in place by those of a batch, and count the batch.

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
        old[...] = moved(old, new, share)


def moved(old: Array, new: Array, share: float | Array, /) -> Array:
    """Return running statistics `old`, moved towards `new` by a `share` from 0 to 1.

    With a share of 0, the result is `old`, even if `new` is NaN because the batch was skipped.
    """
    # `old + share * (new - old)` would keep rounding errors of `old` at momentum 1.
    xp, wide = array_namespace(old), as_wide(old)
    found = (1 - share) * wide + share * xp.reshape(new, old.shape)
    if hasattr(share, "dtype"):
        found = xp.where(share == 0, wide, found)
    return to_device(xp.astype(found, old.dtype, copy=False), device(old))


def variance_factor(
    count: float | Array, local_count: float | Array, convention: RunningVar, /
) -> float | Array:
    """Return the factor of the biased variance, see `multibn.engine.running_variance`."""
    if convention != "unbiased_global":
        check_choice("convention", convention, RunningVar)
        if convention == "biased":
            return 1.0
        if hasattr(local_count, "dtype"):
            xp = array_namespace(local_count)
            count = xp.where(local_count > 0, local_count, 0.0 * local_count + count)
        else:
            count = local_count or count
    return count / at_least_one(count - 1)


def sum_like(summed: Array, x: Array) -> Array:
    """Return a sum as an array of `x`'s library, copied out of the channel's buffer."""
    xp = array_namespace(x)  # torch's asarray would take the default device, which may be a GPU
    of_host = getattr(xp, "from_numpy", xp.asarray)
    return of_host(summed.copy()) if type(summed) is np.ndarray else summed


def as_wide(v: Array, /) -> Array:
    """Return `v`, a per-channel array, in float64; in host memory if its device has no float64."""
    xp = array_namespace(v)
    if v.dtype == xp.float64:
        return v
    if not has_float64(xp, device(v)):
        cpu = "cpu" if is_torch_namespace(xp) else xp.__array_namespace_info__().default_device()
        v = to_device(v, cpu)
    return xp.astype(v, xp.float64, copy=False)


@lru_cache(maxsize=64)
def has_float64(xp: Any, where: Any) -> bool:
    return "float64" in xp.__array_namespace_info__().dtypes(device=where)


def at_least_one(count: float | Array, /) -> float | Array:
    """Return the larger of `count` and 1, to divide by."""
    if hasattr(count, "dtype"):
        return array_namespace(count).clip(count, 1.0, None)
    return max(count, 1.0)  # a number, or torch.compile's symbol for one
