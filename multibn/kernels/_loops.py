"""The loops of the host kernels, compiled by numba.

Arrays come as addresses of dense memory in the order (N, C, S), of which N and S are reduced: the
plane of channel `c` of sample `n` is S elements from `(n * C + c) * S` on. In channels-last memory
S is 1. A loop works on the samples `n0:n1` of the channels `c0:c1`.

Long planes are passed over with their coefficients in registers. Of short ones, several channels,
and several samples where a sample is short too, stand side by side as the columns of a tile, and
the coefficients are written out for each column.

Sums are float64. Moments are taken about the channel's first value. A value is never farther from
the mean of n values than sqrt(n) standard deviations, so that cancellation costs at most a factor n
of the 1e-16 of float64; and a constant has no variance at all.
"""

import ctypes
from typing import Any

import numpy as np
from numba import carray, cfunc, config, njit, types

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: numba compiles nothing")

_LONG = 128  # elements of a long plane
_COLUMNS = 1024  # of a tile: coefficients and sums of so many stay in the first-level cache
_ROWS = 8  # of a tile that are added up before its sums are touched
_LINE = 64  # bytes of a cache line

# Sums may be reordered, to be vectors; no flag here says that there are no NaN or infinities.
_SUMS = {"contract", "reassoc"}
_ELEMENTWISE = {"contract"}


@njit
def _width(C: int, S: int, n0: int, n1: int, c0: int, c1: int) -> tuple[int, int]:
    """Channels, and samples side by side, in the columns of a tile."""
    channels = min(max(_COLUMNS // S, 1), c1 - c0)
    samples = min(max(_COLUMNS // (C * S), 1), n1 - n0) if channels == C else 1
    return channels, samples


@njit
def _columns(dtype: Any, n: int) -> Any:
    """Memory for `n` columns; it begins with a cache line, so that no vector lies in two."""
    memory = np.empty(n + _LINE // 4, dtype)
    start = (-memory.ctypes.data % _LINE) // memory.itemsize
    return memory[start : start + n]


@njit(fastmath=_ELEMENTWISE)
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


@njit(fastmath=_SUMS)
def _gather(columns: Any, a: int, b: int, S: int, times: int, sums: Any, at: int) -> None:
    """Add the columns of the channels `a:b` to their sums."""
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


def _moments(x: Any, sums: Any, C: int, S: int, n0: int, n1: int, c0: int, c1: int) -> None:
    """Add the sums of `x - centre` and of its square, `centre` the channel's first value."""
    centre = np.empty(C)
    for c in range(c0, c1):
        centre[c] = x[c * S]
    if S >= _LONG:
        for n in range(n0, n1):
            for c in range(c0, c1):
                at = (n * C + c) * S
                first = 0.0
                second = 0.0
                for i in range(S):
                    d = np.float64(x[at + i]) - centre[c]
                    first += d
                    second += d * d
                sums[c] += first
                sums[C + c] += second
        return
    width, times = _width(C, S, n0, n1, c0, c1)
    of_column = _columns(np.float64, width * S * times)
    first_of = _columns(np.float64, width * S * times)
    second_of = _columns(np.float64, width * S * times)
    for a in range(c0, c1, width):
        b = min(a + width, c1)
        _spread(centre, a, b, S, times, of_column)
        first_of[:] = 0.0
        second_of[:] = 0.0
        row = times * C * S
        columns = times * (b - a) * S
        n = n0
        while n + _ROWS * times <= n1:
            at = (n * C + a) * S
            for j in range(columns):
                first = 0.0
                second = 0.0
                for k in range(_ROWS):
                    d = np.float64(x[at + k * row + j]) - of_column[j]
                    first += d
                    second += d * d
                first_of[j] += first
                second_of[j] += second
            n += _ROWS * times
        while n < n1:
            at = (n * C + a) * S
            rest = min(times, n1 - n)
            for j in range(rest * (b - a) * S):
                d = np.float64(x[at + j]) - of_column[j]
                first_of[j] += d
                second_of[j] += d * d
            n += rest
        _gather(first_of, a, b, S, times, sums, 0)
        _gather(second_of, a, b, S, times, sums, C)


def _finish_moments(
    x: Any, sums: Any, mean: Any, var: Any, N: int, C: int, S: int, parts: int
) -> None:
    """Mean and variance from the sums of all parts."""
    for c in range(C):
        first = 0.0
        second = 0.0
        for p in range(parts):
            first += sums[2 * p * C + c]
            second += sums[(2 * p + 1) * C + c]
        first /= N * S
        difference = second / (N * S) - first * first
        mean[c] = x[c * S] + first
        var[c] = 0.0 if difference < 0.0 else difference  # NaN stays


def _backward_sums(
    x: Any, dy: Any, mean: Any, sums: Any, C: int, S: int, n0: int, n1: int, c0: int, c1: int
) -> None:
    """Add the sums of `dy` and of `dy * (x - mean)`."""
    if S >= _LONG:
        for n in range(n0, n1):
            for c in range(c0, c1):
                at = (n * C + c) * S
                centre = mean[c]
                first = 0.0
                second = 0.0
                for i in range(S):
                    g = np.float64(dy[at + i])
                    first += g
                    second += g * (np.float64(x[at + i]) - centre)
                sums[c] += first
                sums[C + c] += second
        return
    width, times = _width(C, S, n0, n1, c0, c1)
    of_column = _columns(np.float64, width * S * times)
    first_of = _columns(np.float64, width * S * times)
    second_of = _columns(np.float64, width * S * times)
    for a in range(c0, c1, width):
        b = min(a + width, c1)
        _spread(mean, a, b, S, times, of_column)
        first_of[:] = 0.0
        second_of[:] = 0.0
        row = times * C * S
        columns = times * (b - a) * S
        n = n0
        while n + _ROWS * times <= n1:
            at = (n * C + a) * S
            for j in range(columns):
                first = 0.0
                second = 0.0
                for k in range(_ROWS):
                    g = np.float64(dy[at + k * row + j])
                    first += g
                    second += g * (np.float64(x[at + k * row + j]) - of_column[j])
                first_of[j] += first
                second_of[j] += second
            n += _ROWS * times
        while n < n1:
            at = (n * C + a) * S
            rest = min(times, n1 - n)
            for j in range(rest * (b - a) * S):
                g = np.float64(dy[at + j])
                first_of[j] += g
                second_of[j] += g * (np.float64(x[at + j]) - of_column[j])
            n += rest
        _gather(first_of, a, b, S, times, sums, 0)
        _gather(second_of, a, b, S, times, sums, C)


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


# Each loop's arrays, "x" of the activation's dtype and "w" of float64, and its number of integers.
_LOOPS: dict[str, tuple[Any, str, int, set[str]]] = {
    "moments": (_moments, "xw", 6, _SUMS),
    "finish_moments": (_finish_moments, "xwww", 4, _ELEMENTWISE),
    "backward_sums": (_backward_sums, "xxww", 6, _SUMS),
    "normalize": (_normalize, "xwwwx", 6, _ELEMENTWISE),
    "input_gradient": (_input_gradient, "xxwwwwx", 6, _ELEMENTWISE),
}


def compiled(name: str, dtype: str) -> Any:
    """The loop `name` for activations of `dtype`, as a C function of addresses and integers.

    It is read from numba's cache on disk if that has it, and runs without the interpreter's lock.
    """
    function, arrays, integers, fastmath = _LOOPS[name]
    kinds = {"x": types.CPointer(getattr(types, dtype)), "w": types.CPointer(types.float64)}
    signature = types.void(*(kinds[a] for a in arrays), *[types.int64] * integers)
    options: dict[str, Any] = {"error_model": "numpy", "fastmath": fastmath}
    try:
        native: Any = cfunc(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # there is no place where the cache can be written
        native = cfunc(signature, **options)(function)
    arguments = [*[ctypes.c_void_p] * len(arrays), *[ctypes.c_int64] * integers]
    call: Any = ctypes.CFUNCTYPE(None, *arguments)(native.address)
    call.keeps = native  # its code lives as long as it does
    return call
