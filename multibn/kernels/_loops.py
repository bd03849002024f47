"""The loops of the host kernels, compiled by numba.

Arrays come as addresses of dense memory in the order (N, C, S), of which N and S are reduced: the
plane of channel `c` of sample `n` is S elements from `(n * C + c) * S` on. In channels-last memory
S is 1. A loop works on the samples `n0:n1` of the channels `c0:c1`.

Long planes are passed over with their coefficients in registers. Of short ones, several channels,
and several samples where a sample is short too, stand side by side as the columns of a tile, and
the coefficients are written out for each column.

Sums are of x's dtype for some dozen values in a row, and these are added up in float64. Moments are
taken about the mean of the channel's first values, so that a constant has no variance at all. If
that was far from the mean of all, they are taken again, about the latter: of `n` standard
deviations between the two, cancellation makes an error n**2 times as large.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, config, njit, types

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: numba compiles nothing")

_LONG = 16  # elements of a long plane
_LONG_TO_ADD = 32  # of one that is added up by itself, which takes longer to begin and to end
_COLUMNS = 2048  # of a tile: coefficients and sums of so many stay in the nearest caches
_BESIDE = 512  # columns up to which short samples are put side by side
_RUN = 16  # rows that are added up in x's dtype, at least
_LONG_RUN = 64  # and at most: more where there are so many runs that their errors average out
_VALUES = 256  # of a plane that are, side by side in vectors
_FEW = 8  # values that the centre is the mean of
_FAR = 4  # standard deviations between centre and mean
_LINE = 64  # bytes of a cache line

# Sums may be reordered, to be vectors; no flag here says that there are no NaN or infinities.
SUMS = {"contract", "reassoc"}
ELEMENTWISE = {"contract"}


@njit
def _width(C: int, S: int, n0: int, n1: int, c0: int, c1: int) -> tuple[int, int]:
    """Channels, and samples side by side, in the columns of a tile."""
    channels = min(max(_COLUMNS // S, 1), c1 - c0)
    samples = min(max(_BESIDE // (C * S), 1), n1 - n0) if channels == C else 1
    return channels, samples


@njit
def _run(samples: int, times: int) -> int:
    """How many samples are added up in x's dtype, `times` of them beside each other."""
    return times * min(max(samples // (_RUN * times), _RUN), _LONG_RUN)


@njit
def _columns(dtype: Any, n: int) -> Any:
    """Zeros for `n` columns; they begin with a cache line, so that no vector lies in two."""
    memory = np.zeros(n + _LINE // 4, dtype)
    start = (-memory.ctypes.data % _LINE) // memory.itemsize
    return memory[start : start + n]


@njit(fastmath=ELEMENTWISE)
def _spread(of_channel: Any, a: int, b: int, S: int, times: int, columns: Any) -> None:
    """Write the values of the channels `a:b` to their columns."""
    j = 0
    for _ in range(times):
        if S == 1:
            for c in range(b - a):
                columns[j + c] = of_channel[a + c]
            j += b - a
            continue
        for c in range(a, b):
            for i in range(S):
                columns[j + i] = of_channel[c]
            j += S


@njit(fastmath=SUMS)
def _gather(columns: Any, a: int, b: int, S: int, times: int, sums: Any, at: int) -> None:
    """Add the columns of the channels `a:b` to their sums, and set them to zero."""
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
def _widen(columns: Any, wide: Any) -> None:
    """Add columns to those of float64, and set them to zero."""
    for j in range(columns.size):
        wide[j] += columns[j]
    columns[:] = 0


def _centre(x: Any, mean: Any, N: int, C: int, S: int) -> None:
    """The mean of each channel's first values; exact if they are equal."""
    n = min(_FEW, N * S)
    for c in range(C):
        centre = np.float64(x[c * S])
        rest = 0.0
        for i in range(1, n):
            rest += x[(i // S * C + c) * S + i % S] - centre
        mean[c] = centre + rest / n


@njit(fastmath=SUMS, error_model="numpy")
def _sums_of_part(
    x: Any,
    dy: Any,
    mean: Any,
    sums: Any,
    C: int,
    S: int,
    n0: int,
    n1: int,
    c0: int,
    c1: int,
    moments: bool,
) -> None:
    """Add the sums of `dy` and of `dy * d`, with `d = x - centre`; `moments`: of `d` and `d * d`.

    The centre is the mean rounded to x's dtype.
    """
    own = carray(x, 1).dtype
    zero = own.type(0)
    centre = np.empty(C, own)
    for c in range(c0, c1):
        centre[c] = mean[c]
    if S >= _LONG_TO_ADD:
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
    of_column = _columns(own, width * S * times)
    first_of = _columns(own, width * S * times)
    second_of = _columns(own, width * S * times)
    wide_first = _columns(np.float64, width * S * times)
    wide_second = _columns(np.float64, width * S * times)
    run = _run(n1 - n0, times)
    for a in range(c0, c1, width):
        b = min(a + width, c1)
        _spread(centre, a, b, S, times, of_column)
        for start in range(n0, n1, run):
            stop = min(start + run, n1)
            for n in range(start, stop, times):
                at = (n * C + a) * S
                for j in range(min(times, stop - n) * (b - a) * S):
                    d = x[at + j] - of_column[j]
                    g = d if moments else dy[at + j]
                    product = g * d  # before anything is written: `x` would be read again
                    first_of[j] += g
                    second_of[j] += product
            _widen(first_of, wide_first)
            _widen(second_of, wide_second)
        _gather(wide_first, a, b, S, times, sums, 0)
        _gather(wide_second, a, b, S, times, sums, C)


def _moments(
    x: Any,
    mean: Any,
    sums: Any,
    N: int,
    C: int,
    S: int,
    parts: int,
    first: int,
    step: int,
    c0: int,
    c1: int,
) -> None:
    """The sums of every `step`th part of the samples, from the `first` on."""
    of_parts = carray(sums, 2 * parts * C)
    for p in range(first, parts, step):
        n0, n1 = N * p // parts, N * (p + 1) // parts
        of_part = of_parts[2 * p * C : 2 * (p + 1) * C]
        _sums_of_part(x, x, mean, of_part, C, S, n0, n1, c0, c1, True)


def _backward_sums(
    x: Any,
    dy: Any,
    mean: Any,
    sums: Any,
    N: int,
    C: int,
    S: int,
    parts: int,
    first: int,
    step: int,
    c0: int,
    c1: int,
) -> None:
    """As `_moments`; what rounding left of the mean comes last."""
    of_parts = carray(sums, 2 * parts * C)
    for p in range(first, parts, step):
        n0, n1 = N * p // parts, N * (p + 1) // parts
        of_part = of_parts[2 * p * C : 2 * (p + 1) * C]
        _sums_of_part(x, dy, mean, of_part, C, S, n0, n1, c0, c1, False)
        centre = np.empty(1, carray(x, 1).dtype)
        for c in range(c0, c1):
            centre[0] = mean[c]
            of_part[C + c] -= (mean[c] - np.float64(centre[0])) * of_part[c]


def _finish_moments(
    x: Any, sums: Any, mean: Any, var: Any, N: int, C: int, S: int, parts: int
) -> int:
    """Mean, in place of the centre, and variance from the sums of all parts.

    Returns the number of channels whose centre was far from the mean.
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


def _normalize(
    x: Any,
    mean: Any,
    scale: Any,
    shift: Any,
    y: Any,
    C: int,
    S: int,
    n0: int,
    n1: int,
    c0: int,
    c1: int,
) -> None:
    """`(x - mean) * scale + shift`; what rounding left of the mean goes into the shift."""
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


def _input_gradient(
    x: Any,
    dy: Any,
    mean: Any,
    dy_scale: Any,
    x_scale: Any,
    shift: Any,
    dx: Any,
    C: int,
    S: int,
    n0: int,
    n1: int,
    c0: int,
    c1: int,
) -> None:
    """`(x - mean) * x_scale + dy * dy_scale + shift`, the mean as in `_normalize`."""
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
    """A function to compile.

    Its arguments are arrays, "x" of the activation's dtype and "w" of float64, then so many
    integers, then so many floats.
    """

    function: Any
    arrays: str
    integers: int
    fastmath: set[str]
    floats: int = 0
    returns: bool = False  # an integer


LOOPS: dict[str, Loop] = {
    "centre": Loop(_centre, "xw", 3, ELEMENTWISE),
    "moments": Loop(_moments, "xww", 8, SUMS),
    "finish_moments": Loop(_finish_moments, "xwww", 4, ELEMENTWISE, returns=True),
    "backward_sums": Loop(_backward_sums, "xxww", 8, SUMS),
    "normalize": Loop(_normalize, "xwwwx", 6, ELEMENTWISE),
    "input_gradient": Loop(_input_gradient, "xxwwwwx", 6, ELEMENTWISE),
}


def compiled(loop: Loop, dtype: str) -> Any:
    """A loop for activations of `dtype`, as a C function of addresses and numbers.

    It is read from numba's cache on disk if that has it, and runs without the interpreter's lock.
    """
    kinds = {"x": types.CPointer(getattr(types, dtype)), "w": types.CPointer(types.float64)}
    numbers = [types.int64] * loop.integers + [types.float64] * loop.floats
    result = types.int64 if loop.returns else types.void
    signature = result(*(kinds[a] for a in loop.arrays), *numbers)
    options: dict[str, Any] = {"error_model": "numpy", "fastmath": loop.fastmath or False}
    try:
        native: Any = cfunc(signature, cache=True, **options)(loop.function)
    except (RuntimeError, OSError):  # there is no place where the cache can be written
        native = cfunc(signature, **options)(loop.function)
    arguments: list[Any] = [ctypes.c_void_p] * len(loop.arrays)
    arguments += [ctypes.c_int64] * loop.integers + [ctypes.c_double] * loop.floats
    call: Any = ctypes.CFUNCTYPE(ctypes.c_int64 if loop.returns else None, *arguments)(
        native.address
    )
    call.keeps = native  # its code lives as long as it does
    return call
