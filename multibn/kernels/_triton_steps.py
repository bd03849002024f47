"""The steps between the passes as Triton kernels; `cuda_steps` launches them.

A program handles BLOCK of the C channels; the first program writes the scalars, too. Arithmetic is
float64, whatever the dtype of parameters and running statistics.

Triton would pass a Python float in float32, so a number comes as its 64 bits in an int64, or as the
address of a tensor with one element.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

import triton
import triton.language as tl

from multibn import message

WEIGHT, COUNT = tl.constexpr(message.WEIGHT), tl.constexpr(message.COUNT)


@triton.jit(do_not_specialize=["weight", "count"])
def unpack(
    summed, mean, var, total_count, element_weight,
    weight: tl.int64, count: tl.int64, C, BLOCK: tl.constexpr,
):  # fmt: skip
    """`count` is at least 1."""
    c, exists = _channels(C, BLOCK)
    total_weight = tl.load(summed + 2 * C + WEIGHT)
    divisor = tl.where(total_weight == 0.0, 1.0, total_weight)
    m = tl.load(summed + c, exists) / divisor
    difference = tl.load(summed + C + c, exists) / divisor - m * m
    tl.store(mean + c, m, exists)
    tl.store(var + c, tl.where(difference < 0.0, 0.0, difference), exists)  # a NaN stays
    if tl.program_id(0) == 0:
        tl.store(total_count, tl.load(summed + 2 * C + COUNT))
        tl.store(element_weight, number(weight) / (number(count) * divisor))


@triton.jit(do_not_specialize=["momentum", "factor"])
def move(
    running_mean, running_var, num_batches, mean, var, count, momentum: tl.int64, factor: tl.int64,
    C, CUMULATIVE: tl.constexpr, UNBIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`num_batches` is None, or a counter: CUMULATIVE reads it, otherwise it is moved, too."""
    c, exists = _channels(C, BLOCK)
    n = tl.load(count)
    seen = n > 0.0
    if CUMULATIVE:
        a = 1.0 / tl.maximum(tl.load(num_batches), 1).to(tl.float64)
    else:
        a = number(momentum)
        if num_batches is not None:
            _count(num_batches, seen)
    a = tl.where(seen, a, 0.0)
    f = n / tl.where(n < 2.0, 1.0, n - 1.0) if UNBIASED else number(factor)
    _move(running_mean + c, tl.load(mean + c, exists), exists, a)
    _move(running_var + c, tl.load(var + c, exists) * f, exists, a)


@triton.jit
def store_packed(packed, c, mean, meansqr, weight, count, C):
    """Store the part of channels `c` of a payload; the first program stores weight and count."""
    w = number(weight)
    tl.store(packed + c, w * mean, c < C)
    tl.store(packed + C + c, w * meansqr, c < C)
    if tl.program_id(0) == 0:
        tl.store(packed + 2 * C + WEIGHT, w)
        tl.store(packed + 2 * C + COUNT, number(count))


@triton.jit
def number(v):
    # Triton passes a small Python int in 32 bits if the parameter has no annotation.
    return tl.load(v) if v.dtype.is_ptr() else v.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _channels(C, BLOCK: tl.constexpr):
    """This program's channels, and which of these exist."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return c, c < C


@triton.jit
def _count(num_batches, seen):
    # One program writes, and no other one may read the counter then.
    if tl.program_id(0) == 0:
        tl.store(num_batches, tl.load(num_batches) + seen.to(tl.int64))


@triton.jit
def _move(running, new, exists, momentum):
    wide = (1.0 - momentum) * tl.load(running, exists).to(tl.float64) + momentum * new
    if running.dtype.element_ty != tl.float64:
        wide = wide.to(tl.float32)  # torch rounds to 16 bits by way of float32, too
    tl.store(running, wide.to(running.dtype.element_ty), exists)
