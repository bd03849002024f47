"""The steps between the passes as Triton kernels; `cuda` launches them.

A step is dozens of operations on C numbers: one launch each would take longer than the passes over
a small activation.

A program handles BLOCK of the C channels; the first program also writes the values that belong to
no channel. Arithmetic is float64, whatever the dtype of parameters and running statistics. The
coefficients of the passes are rounded once, to the dtype of the passes' arithmetic.

Triton would pass a Python float in float32, so a number is passed as its 64 bits in an int64, or
as the address of a tensor with one element.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

import triton
import triton.language as tl
from triton.language import constexpr

from multibn import wire

WEIGHT, COUNT = constexpr(wire.WEIGHT), constexpr(wire.COUNT)
SCALARS = constexpr(wire.forward_payload(0))
LARGEST, LARGEST_SUM = constexpr(wire.LARGEST), constexpr(wire.LARGEST_SUM)

_CONSTANTS = {"BLOCK", "SHARE", "SPLITS", "CUMULATIVE", "UNBIASED"}


def _step(function):
    """Decorate a Triton kernel that is specialized on neither sizes nor alignment."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    others = [name for name in names if name not in _CONSTANTS]
    return triton.jit(do_not_specialize=others)(function)


@_step
def merge_moments(
    partials, numbers, rank_weight, count, mark, start, length, fingerprint, splits, C,
    BLOCK: constexpr, SPLITS: constexpr,
):  # fmt: skip
    """Write the forward message, from the sums of `passes.moments`.

    The splits' moments are added up about the centre of one split, which is near the mean.
    """
    c, exists = _channels(C, BLOCK)
    size = splits * C
    reference = tl.load(partials + size + c, exists, 0.0).to(tl.float64)
    n = tl.zeros((1, BLOCK), tl.float64)
    first_sum = tl.zeros((1, BLOCK), tl.float64)
    second_sum = tl.zeros((1, BLOCK), tl.float64)
    for first in range(0, splits, SPLITS):
        at, inside = _splits(first, splits, c, C, SPLITS)
        count_in_split = tl.load(partials + at, inside, 0.0).to(tl.float64)
        centre = tl.load(partials + size + at, inside, 0.0).to(tl.float64)
        sum_d = tl.load(partials + 2 * size + at, inside, 0.0).to(tl.float64)
        sum_dd = tl.load(partials + 3 * size + at, inside, 0.0).to(tl.float64)
        shift = tl.where(inside, centre - reference, 0.0)
        n += tl.sum(count_in_split, 0, keep_dims=True)
        first_sum += tl.sum(sum_d + count_in_split * shift, 0, keep_dims=True)
        about = sum_dd + (2.0 * sum_d + count_in_split * shift) * shift
        second_sum += tl.sum(about, 0, keep_dims=True)
    n = tl.where(n == 0.0, 1.0, n)
    first_sum /= n
    mean = reference + first_sum
    var = second_sum / n - first_sum * first_sum
    var = tl.where(var < 0.0, 0.0, var)  # a NaN stays
    w = number(rank_weight)
    payload = numbers + start
    meansqr = w * (var + mean * mean)
    is_finite = meansqr < LARGEST  # not a NaN
    tl.store(payload + c, tl.where(is_finite, w * mean, number(mark)), exists)
    tl.store(payload + C + c, tl.where(is_finite, meansqr, number(mark)), exists)
    if tl.program_id(0) == 0:
        tl.store(payload + 2 * C + WEIGHT, w)
        tl.store(payload + 2 * C + COUNT, number(count))
        _store_around(numbers, start, 2 * C + SCALARS, length, fingerprint)


@_step
def merge_sums(
    partials, statistics, weight, bias, coefficients, numbers, dweight, dbias, start, length,
    fingerprint, eps, splits, C, BLOCK: constexpr, SPLITS: constexpr,
):  # fmt: skip
    """Write the backward message, from the sums of `passes.backward_sums`.

    Also writes the coefficients of the passes, and this rank's gradients into `dweight` and
    `dbias`, which may be None.
    """
    c, exists = _channels(C, BLOCK)
    first_sum = tl.zeros((1, BLOCK), tl.float64)
    second_sum = tl.zeros((1, BLOCK), tl.float64)
    for first in range(0, splits, SPLITS):
        at, inside = _splits(first, splits, c, C, SPLITS)
        first_sum += tl.sum(tl.load(partials + at, inside, 0.0).to(tl.float64), 0, keep_dims=True)
        others = partials + splits * C
        second_sum += tl.sum(tl.load(others + at, inside, 0.0).to(tl.float64), 0, keep_dims=True)
    m, v = _load_statistics(statistics, c, exists, C)
    invstd, remainder = _store_coefficients(coefficients, c, exists, C, m, v, weight, bias, eps)
    second_sum = (second_sum - remainder * first_sum) * invstd
    payload = numbers + start
    tl.store(payload + c, first_sum, exists)
    tl.store(payload + C + c, second_sum, exists)
    if dweight is not None:
        _store_rounded(dweight + c, second_sum, exists)
    if dbias is not None:
        _store_rounded(dbias + c, first_sum, exists)
    if tl.program_id(0) == 0:
        _store_around(numbers, start, 2 * C, length, fingerprint)


@_step
def nonfinite_flags(numbers, found, length, SHARE: constexpr):
    """Find NaN or a mark in each program's part of a message, see `_gap`."""
    first = tl.program_id(0) * SHARE
    tl.store(found + tl.program_id(0), _gap(numbers + first, tl.minimum(length - first, SHARE)))


@_step
def finish_forward(
    summed, statistics, weight, bias, coefficients, running_mean, running_var, num_batches,
    checked, rank_weight, count, eps, momentum, factor, length, C,
    CUMULATIVE: constexpr, UNBIASED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Write the statistics and the coefficients of the passes; update the running statistics.

    `checked` has `length` numbers, which every program reads: the message or, if it is long, the
    message's `nonfinite_flags`. `weight`, `bias` and the running statistics may be None.
    """
    c, exists = _channels(C, BLOCK)
    gap = _gap(checked, length)
    total = tl.where(gap == 0.0, tl.load(summed + 2 * C + COUNT), 0.0)
    total_weight = tl.load(summed + 2 * C + WEIGHT)
    divisor = tl.where(total_weight == 0.0, 1.0, total_weight)
    if tl.program_id(0) == 0:
        tl.store(statistics + 2 * C, total)
        n = tl.maximum(number(count), 1.0)
        tl.store(statistics + 2 * C + 1, number(rank_weight) / (n * divisor))
    m = tl.load(summed + c, exists, 0.0) / divisor + gap
    v = tl.load(summed + C + c, exists, 0.0) / divisor - m * m
    v = tl.where(v < 0.0, 0.0, v)  # a NaN stays
    tl.store(statistics + c, m, exists)
    tl.store(statistics + C + c, v, exists)
    _store_coefficients(coefficients, c, exists, C, m, v, weight, bias, eps)
    if running_mean is not None:
        _update_running(
            running_mean, running_var, num_batches, c, exists, m, v, total, momentum, factor,
            CUMULATIVE, UNBIASED,
        )  # fmt: skip


@_step
def coefficients_of(statistics, weight, bias, coefficients, eps, C, BLOCK: constexpr):
    """Write the coefficients of the passes."""
    c, exists = _channels(C, BLOCK)
    m, v = _load_statistics(statistics, c, exists, C)
    _store_coefficients(coefficients, c, exists, C, m, v, weight, bias, eps)


@_step
def gradient_coefficients(summed, statistics, weight, coefficients, eps, C, BLOCK: constexpr):
    """Implement `reference.gradient_coefficients`, for compiled code; `weight` may be None."""
    c, exists = _channels(C, BLOCK)
    DTYPE = coefficients.dtype.element_ty
    m, v = _load_statistics(statistics, c, exists, C)
    centre = m.to(DTYPE)
    invstd = 1.0 / tl.sqrt(v + number(eps))
    dy_scale = invstd
    if weight is not None:
        dy_scale = invstd * tl.load(weight + c, exists, 0.0).to(tl.float64)
    pull = -dy_scale * tl.load(statistics + 2 * C + 1)
    x_scale = pull * invstd * tl.load(summed + C + c, exists, 0.0)
    shift = pull * tl.load(summed + c, exists, 0.0) - (m - centre.to(tl.float64)) * x_scale
    tl.store(coefficients + c, centre, exists)
    tl.store(coefficients + C + c, x_scale.to(DTYPE), exists)
    tl.store(coefficients + 2 * C + c, dy_scale.to(DTYPE), exists)
    tl.store(coefficients + 3 * C + c, shift.to(DTYPE), exists)


@triton.jit
def number(v):
    return tl.load(v) if v.dtype.is_ptr() else v.to(tl.float64, bitcast=True)


@triton.jit
def _load_statistics(statistics, c, exists, C):
    """Return mean and variance."""
    return tl.load(statistics + c, exists, 0.0), tl.load(statistics + C + c, exists, 1.0)


@triton.jit
def _gap(numbers, length):
    """Return 0, or NaN if one of the numbers is a mark: see `skipped` of kernels/steps.py."""
    gap = tl.zeros((1024,), tl.float64)
    for first in range(0, length, 1024):
        i = first + tl.arange(0, 1024)
        is_finite = tl.abs(tl.load(numbers + i, i < length, 0.0)) < LARGEST_SUM
        gap += tl.where(is_finite, 0.0, float("nan"))
    return tl.sum(gap, 0)


@triton.jit
def _channels(C, BLOCK: constexpr):
    """Return this program's channels, as a row, and which of them exist."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return c, c < C


@triton.jit
def _splits(first, splits, c, C, SPLITS: constexpr):
    """Return the offsets of some splits' sums, and which of them exist."""
    split = first + tl.arange(0, SPLITS)[:, None]
    return split * C + c, (split < splits) & (c < C)


@triton.jit
def _store_around(numbers, start, payload, length, fingerprint):
    """Write the head before a payload, if there is room for it, and zeros after the payload."""
    v = number(fingerprint)
    for first in range(0, length, 1024):
        i = first + tl.arange(0, 1024)
        around = (i < length) & ((i < start) | (i >= start + payload))
        lane = tl.where(i < start, tl.where(i == 0, v, v * v), 0.0)
        tl.store(numbers + i, lane, around)


@triton.jit
def _store_coefficients(coefficients, c, exists, C, mean, var, weight, bias, eps):
    """Write the coefficients, see `passes`; return invstd and remainder in float64."""
    DTYPE = coefficients.dtype.element_ty
    centre = mean.to(DTYPE)
    remainder = mean - centre.to(tl.float64)
    invstd = 1.0 / tl.sqrt(var + number(eps))
    scale = invstd
    if weight is not None:
        scale = invstd * tl.load(weight + c, exists, 0.0).to(tl.float64)
    shift = -remainder * scale
    if bias is not None:
        shift += tl.load(bias + c, exists, 0.0).to(tl.float64)
    tl.store(coefficients + c, centre, exists)
    tl.store(coefficients + C + c, scale.to(DTYPE), exists)
    tl.store(coefficients + 2 * C + c, shift.to(DTYPE), exists)
    tl.store(coefficients + 3 * C + c, invstd.to(DTYPE), exists)
    tl.store(coefficients + 4 * C + c, remainder.to(DTYPE), exists)
    return invstd, remainder


@triton.jit
def _update_running(
    running_mean, running_var, num_batches, c, exists, mean, var, n, momentum, factor,
    CUMULATIVE: constexpr, UNBIASED: constexpr,
):  # fmt: skip
    seen = n > 0.0
    if CUMULATIVE:  # all programs read the counter, which is written after this kernel
        batches = tl.load(num_batches) + seen.to(tl.int64)
        a = 1.0 / tl.maximum(batches, 1).to(tl.float64)
    else:
        a = number(momentum)
        if num_batches is not None:  # noqa: SIM102  Triton takes None for a constant here only
            if tl.program_id(0) == 0:  # one program writes, and none reads
                tl.store(num_batches, tl.load(num_batches) + seen.to(tl.int64))
    a = tl.where(seen, a, 0.0)
    f = n / tl.where(n < 2.0, 1.0, n - 1.0)
    if not UNBIASED:  # by this rank's factor; it is 0 if the rank has no elements
        own = number(factor)
        f = tl.where(own == 0.0, f, own)
    _move_one(running_mean + c, mean, exists, a)
    _move_one(running_var + c, var * f, exists, a)


@triton.jit
def _move_one(running, new, exists, momentum):
    old = tl.load(running, exists, 0.0).to(tl.float64)
    wide = (1.0 - momentum) * old + momentum * new
    wide = tl.where(momentum == 0.0, old, wide)  # 0 * NaN is NaN
    _store_rounded(running, wide, exists)


@triton.jit
def _store_rounded(at, v, exists):
    if at.dtype.element_ty != tl.float64:
        v = v.to(tl.float32)  # torch rounds to 16 bits by way of float32, too
    tl.store(at, v.to(at.dtype.element_ty), exists)
