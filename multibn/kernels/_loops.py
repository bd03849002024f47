"""The loops of the host kernels, compiled by numba.

A loop takes arrays as addresses of dense memory in the order (N, C, S), of which N and S are
reduced: the plane of channel `c` of sample `n` is the S elements from `(n * C + c) * S` on. S is 1
in channels-last memory. A loop handles the samples `n0:n1` of the channels `c0:c1`.

In a long plane the channel's coefficients stay in registers. Short planes are handled in tiles: the
columns of a tile are the planes of several channels side by side, and of several samples where a
sample is short too; each column has its own copy of the coefficients.

A few dozen values in a row are summed in x's dtype, and these sums are added up in float64. Moments
are taken about the mean of the channel's first values, so that a constant has no variance at all.
If this centre turns out to be far from the mean of all values, the moments are taken again about
the mean: cancellation multiplies the error by n**2 for a centre n standard deviations away.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# `Loop` and its tables give the types of the loops' arguments.

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, config, njit, types

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: numba compiles nothing")

# Planes of at least so many elements are long: they are handled without a tile.
_LONG = 16
_LONG_TO_SUM = 32  # a sum has its start and end to pay for, too
_VALUES = 256  # elements of a long plane summed in x's dtype before the sum moves to float64
_COLUMNS = 2048  # of a tile: the coefficients and sums of so many stay in the nearest caches
_BESIDE = 512  # up to so many columns, short samples stand side by side
# Rows of a tile summed in x's dtype: more where so many sums follow that their errors average out.
_RUN, _LONG_RUN = 16, 64
_FEW = 8  # values whose mean is the first centre
_FAR = 4  # standard deviations between centre and mean from which the moments are taken again
_LINE = 64  # bytes of a cache line

# The compiler may reorder sums to vectorize them; no flag here lets it ignore NaN or infinities.
SUMS = {"contract", "reassoc"}
ELEMENTWISE = {"contract"}


@njit
def _width(C, S, n0, n1, c0, c1):
    """How many channels, and how many samples side by side, a tile has as its columns."""
    channels = min(max(_COLUMNS // S, 1), c1 - c0)
    samples = min(max(_BESIDE // (C * S), 1), n1 - n0) if channels == C else 1
    return channels, samples


@njit
def _run(samples, times):
    """Samples to sum in x's dtype, where `times` of them stand side by side."""
    return times * min(max(samples // (_RUN * times), _RUN), _LONG_RUN)


@njit
def _columns(dtype, n):
    """Zeros for `n` columns, from the start of a cache line: no vector then crosses two lines."""
    memory = np.zeros(n + _LINE // 4, dtype)
    start = (-memory.ctypes.data % _LINE) // memory.itemsize
    return memory[start : start + n]


@njit(fastmath=ELEMENTWISE)
def _spread(values, a, b, S, times, columns):
    """Copy the values of the channels `a:b` to each of their columns."""
    j = 0
    for _ in range(times):
        if S == 1:
            for c in range(b - a):
                columns[j + c] = values[a + c]
            j += b - a
            continue
        for c in range(a, b):
            for i in range(S):
                columns[j + i] = values[c]
            j += S


@njit(fastmath=SUMS)
def _gather(columns, a, b, S, times, sums, at):
    """Add the columns of the channels `a:b` to the channels' sums, and set the columns to zero."""
    j = 0
    for _ in range(times):
        if S == 1:
            for c in range(b - a):
                sums[at + a + c] += columns[j + c]
            j += b - a
            continue
        for c in range(a, b):
            total = 0.0
            for i in range(S):
                total += columns[j + i]
            sums[at + c] += total
            j += S
    columns[:] = 0


@njit(fastmath=SUMS)
def _widen(columns, wide):
    """Add the columns to the float64 columns `wide`, and set them to zero."""
    for j in range(columns.size):
        wide[j] += columns[j]
    columns[:] = 0


def _centre(x, mean, N, C, S):
    """The mean of each channel's first values; exact if these are equal."""
    n = min(_FEW, N * S)
    for c in range(C):
        centre = np.float64(x[c * S])
        rest = 0.0
        for i in range(1, n):
            rest += x[(i // S * C + c) * S + i % S] - centre
        mean[c] = centre + rest / n


@njit(fastmath=SUMS, error_model="numpy")
def _add_sums(x, dy, mean, sums, C, S, n0, n1, c0, c1, moments):
    """Add the sums of `g` and of `g * d` to `sums`, where `d = x - mean`, with a rounded mean.

    `g` is `dy`, or `d` for moments.
    """
    own = carray(x, 1).dtype
    zero = own.type(0)
    centre = np.empty(C, own)
    for c in range(c0, c1):
        centre[c] = mean[c]
    if S >= _LONG_TO_SUM:
        for n in range(n0, n1):
            for c in range(c0, c1):
                at = (n * C + c) * S
                m = centre[c]
                for start in range(at, at + S, _VALUES):
                    first = zero
                    second = zero
                    for i in range(start, min(start + _VALUES, at + S)):
                        d = x[i] - m
                        g = d if moments else dy[i]
                        first += g
                        second += g * d
                    sums[c] += first
                    sums[C + c] += second
        return
    width, times = _width(C, S, n0, n1, c0, c1)
    centres = _columns(own, width * S * times)
    firsts = _columns(own, width * S * times)
    seconds = _columns(own, width * S * times)
    wide_first = _columns(np.float64, width * S * times)
    wide_second = _columns(np.float64, width * S * times)
    run = _run(n1 - n0, times)
    for a in range(c0, c1, width):
        b = min(a + width, c1)
        _spread(centre, a, b, S, times, centres)
        for start in range(n0, n1, run):
            stop = min(start + run, n1)
            for n in range(start, stop, times):
                at = (n * C + a) * S
                for j in range(min(times, stop - n) * (b - a) * S):
                    d = x[at + j] - centres[j]
                    g = d if moments else dy[at + j]
                    product = g * d  # computed here: after the next line, x would be read again
                    firsts[j] += g
                    seconds[j] += product
            _widen(firsts, wide_first)
            _widen(seconds, wide_second)
        _gather(wide_first, a, b, S, times, sums, 0)
        _gather(wide_second, a, b, S, times, sums, C)


def _moments(x, mean, sums, N, C, S, parts, first, step, c0, c1):
    """Sums of `d` and `d * d`, of every `step`th of the `parts` of the samples from `first` on."""
    all_sums = carray(sums, 2 * parts * C)
    for p in range(first, parts, step):
        n0, n1 = N * p // parts, N * (p + 1) // parts
        part_sums = all_sums[2 * p * C : 2 * (p + 1) * C]
        _add_sums(x, x, mean, part_sums, C, S, n0, n1, c0, c1, True)


def _backward_sums(x, dy, mean, sums, N, C, S, parts, first, step, c0, c1):
    """As `_moments`, of `dy` and `dy * (x - mean)`, where the mean is not rounded."""
    all_sums = carray(sums, 2 * parts * C)
    for p in range(first, parts, step):
        n0, n1 = N * p // parts, N * (p + 1) // parts
        part_sums = all_sums[2 * p * C : 2 * (p + 1) * C]
        _add_sums(x, dy, mean, part_sums, C, S, n0, n1, c0, c1, False)
        centre = np.empty(1, carray(x, 1).dtype)
        for c in range(c0, c1):
            centre[0] = mean[c]
            part_sums[C + c] -= (mean[c] - np.float64(centre[0])) * part_sums[c]


def _finish_moments(x, sums, mean, var, N, C, S, parts):
    """Write the variance from the sums of all parts, and the mean in place of the centre.

    Returns how many channels had a centre that was far from the mean.
    """
    own = carray(x, 1).dtype
    centre = np.empty(1, own)
    far = 0
    for c in range(C):
        first = 0.0
        second = 0.0
        for p in range(parts):
            first += sums[2 * p * C + c]
            second += sums[(2 * p + 1) * C + c]
        first /= N * S
        difference = second / (N * S) - first * first
        centre[0] = mean[c]
        mean[c] = centre[0] + first
        var[c] = 0.0 if difference < 0.0 else difference  # NaN stays
        far += first * first > _FAR * _FAR * var[c]
    return far


def _normalize(x, mean, scale, shift, y, C, S, n0, n1, c0, c1):
    """`(x - mean) * scale + shift`; the rounding error of the mean is put into the shift."""
    own = carray(x, 1).dtype
    centre, factor, offset = np.empty(C, own), np.empty(C, own), np.empty(C, own)
    for c in range(c0, c1):
        centre[c] = mean[c]
        factor[c] = scale[c]
        offset[c] = shift[c] - (mean[c] - np.float64(centre[c])) * scale[c]
    if S >= _LONG:
        for n in range(n0, n1):
            for c in range(c0, c1):
                at = (n * C + c) * S
                m, f, o = centre[c], factor[c], offset[c]
                for i in range(S):
                    y[at + i] = (x[at + i] - m) * f + o
        return
    width, times = _width(C, S, n0, n1, c0, c1)
    means = _columns(own, width * S * times)
    factors = _columns(own, width * S * times)
    offsets = _columns(own, width * S * times)
    for a in range(c0, c1, width):
        b = min(a + width, c1)
        _spread(centre, a, b, S, times, means)
        _spread(factor, a, b, S, times, factors)
        _spread(offset, a, b, S, times, offsets)
        for n in range(n0, n1, times):
            at = (n * C + a) * S
            for j in range(min(times, n1 - n) * (b - a) * S):
                y[at + j] = (x[at + j] - means[j]) * factors[j] + offsets[j]


def _input_gradient(x, dy, mean, dy_scale, x_scale, shift, dx, C, S, n0, n1, c0, c1):
    """`(x - mean) * x_scale + dy * dy_scale + shift`, with the mean as in `_normalize`."""
    own = carray(x, 1).dtype
    centre, factor, offset = np.empty(C, own), np.empty(C, own), np.empty(C, own)
    slope = np.empty(C, own)
    for c in range(c0, c1):
        centre[c] = mean[c]
        slope[c] = dy_scale[c]
        factor[c] = x_scale[c]
        offset[c] = shift[c] - (mean[c] - np.float64(centre[c])) * x_scale[c]
    if S >= _LONG:
        for n in range(n0, n1):
            for c in range(c0, c1):
                at = (n * C + c) * S
                m, g, f, o = centre[c], slope[c], factor[c], offset[c]
                for i in range(S):
                    dx[at + i] = (x[at + i] - m) * f + (dy[at + i] * g + o)
        return
    width, times = _width(C, S, n0, n1, c0, c1)
    means = _columns(own, width * S * times)
    slopes = _columns(own, width * S * times)
    factors = _columns(own, width * S * times)
    offsets = _columns(own, width * S * times)
    for a in range(c0, c1, width):
        b = min(a + width, c1)
        _spread(centre, a, b, S, times, means)
        _spread(slope, a, b, S, times, slopes)
        _spread(factor, a, b, S, times, factors)
        _spread(offset, a, b, S, times, offsets)
        for n in range(n0, n1, times):
            at = (n * C + a) * S
            for j in range(min(times, n1 - n) * (b - a) * S):
                dx[at + j] = (x[at + j] - means[j]) * factors[j] + (
                    dy[at + j] * slopes[j] + offsets[j]
                )


class Loop(NamedTuple):
    """A function to compile, with the types of its arguments.

    First come the arrays, "x" in the activation's dtype and "w" in float64, then the integers, then
    the floats.
    """

    function: Any
    arrays: str
    integers: int
    fastmath: set[str]
    floats: int = 0
    returns: bool = False  # whether the function returns an integer


LOOPS: dict[str, Loop] = {
    "centre": Loop(_centre, "xw", 3, ELEMENTWISE),
    "moments": Loop(_moments, "xww", 8, SUMS),
    "finish_moments": Loop(_finish_moments, "xwww", 4, ELEMENTWISE, returns=True),
    "backward_sums": Loop(_backward_sums, "xxww", 8, SUMS),
    "normalize": Loop(_normalize, "xwwwx", 6, ELEMENTWISE),
    "input_gradient": Loop(_input_gradient, "xxwwwwx", 6, ELEMENTWISE),
}


def compiled(loop: Loop, dtype: str) -> Any:
    """The loop for activations of `dtype`, as a C function of addresses and numbers.

    numba reads it from its cache on disk where possible; calls release the interpreter's lock.
    """
    kinds = {"x": types.CPointer(getattr(types, dtype)), "w": types.CPointer(types.float64)}
    numbers = [types.int64] * loop.integers + [types.float64] * loop.floats
    result = types.int64 if loop.returns else types.void
    signature = result(*(kinds[a] for a in loop.arrays), *numbers)
    options: dict[str, Any] = {"error_model": "numpy", "fastmath": loop.fastmath or False}
    try:
        native: Any = cfunc(signature, cache=True, **options)(loop.function)
    except (RuntimeError, OSError):  # no folder for the cache can be written to
        native = cfunc(signature, **options)(loop.function)
    arguments: list[Any] = [ctypes.c_void_p] * len(loop.arrays)
    arguments += [ctypes.c_int64] * loop.integers + [ctypes.c_double] * loop.floats
    call: Any = ctypes.CFUNCTYPE(ctypes.c_int64 if loop.returns else None, *arguments)(
        native.address
    )
    call.native = native  # keeps the machine code alive
    return call
