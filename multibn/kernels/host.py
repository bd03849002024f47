"""The four passes for host memory, NumPy arrays and torch tensors alike, compiled by numba.

`generic` says what each pass does. Compiled loops see an array as an address and three sizes in the
order of memory, (N, C, S), of which N and S are reduced. Contiguous and channels-last activations
of any number of dimensions are such, and are not copied. Other strides and 16-bit dtypes are first
copied to dense memory of the arithmetic dtype. What has no (N, C, S), `generic` does.

Large arrays are shared between threads: as many as torch is set to use, or as OMP_NUM_THREADS says
where torch is not loaded. How a sum is cut into parts depends on the shape alone, and so its value
does not depend on the number of threads.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

from multibn._typing import Array
from multibn.kernels import _loops, generic
from multibn.kernels._memory import library

_SHARE = 1 << 19  # elements that are worth a thread
_WIDE = 1 << 16  # elements of a sample from which on channels are shared out, and not samples
_PARTS = 64  # of a sum over samples, at most


def local_moments(x: Array, /, *, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """As `generic.local_moments`."""
    given = _prepare(axis, (x,))
    if given is None:
        return generic.local_moments(x, axis=axis)
    plan, of = given.plan, given.library
    (mean, var), (mean_at, var_at) = of.new(2, plan.shape, of.float64)
    (x_at,) = given.addresses
    _loop("centre", plan.dtype)(x_at, mean_at, *given.sizes)
    for _ in range(2):  # again if the centre was far from the mean, which is the centre now
        sums = _sums("moments", given, mean_at)
        far = _loop("finish_moments", plan.dtype)(
            x_at, of.address(sums), mean_at, var_at, *given.sizes, sums.shape[0]
        )
        if not far:
            break
    return mean, var


def normalize(
    x: Array, mean: Array, scale: Array, shift: Array, /, *, axis: tuple[int, ...]
) -> Array:
    """As `generic.normalize`."""
    given = _prepare(axis, (x,), mean, scale, shift)
    if given is None:
        return generic.normalize(x, mean, scale, shift, axis=axis)
    return _elementwise("normalize", given, x)


def backward_sums(
    dy: Array, x: Array, mean: Array, /, *, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """As `generic.backward_sums`."""
    given = _prepare(axis, (x, dy), mean)
    if given is None:
        return generic.backward_sums(dy, x, mean, axis=axis)
    sums = _sums("backward_sums", given)
    whole = sums.sum(0) if sums.shape[0] > 1 else sums[0]
    return whole[0], whole[1]


def input_gradient(
    dy: Array,
    x: Array,
    mean: Array,
    dy_scale: Array,
    x_scale: Array,
    shift: Array,
    /,
    *,
    axis: tuple[int, ...],
) -> Array:
    """As `generic.input_gradient`."""
    given = _prepare(axis, (x, dy), mean, dy_scale, x_scale, shift)
    if given is None:
        return generic.input_gradient(dy, x, mean, dy_scale, x_scale, shift, axis=axis)
    return _elementwise("input_gradient", given, x)


class _Plan(NamedTuple):
    """What is known of a pass before its arrays are."""

    shape: tuple[int, ...]  # of a per-channel array
    dtype: str  # that the arithmetic is done in
    is_dtype: bool  # whether it is that of the activation
    sizes: tuple[int, int, int] | None  # None if it must be copied to have them


class _Given(NamedTuple):
    """The arguments of a pass as the loops take them."""

    library: Any
    plan: _Plan
    sizes: tuple[int, int, int]  # (N, C, S)
    arrays: list[Array]  # activations dense and in the order of the first, `x`; what must be kept
    addresses: list[int]


def _prepare(
    axis: tuple[int, ...], activations: tuple[Array, ...], *per_channel: Array
) -> _Given | None:
    """None if the loops cannot take them."""
    x = activations[0]
    of = library(x)
    address = of.address(x)
    if not address:
        return None
    strides = of.strides(x)
    plan = _plan(x.dtype, x.shape, strides, axis)
    if plan is None:
        return None
    dtype, sizes = x.dtype, plan.sizes
    if sizes is None or not plan.is_dtype:
        x = of.cast(x, plan.dtype)
        sizes = _sizes(x.shape, of.strides(x), axis)
        if sizes is None:
            x = of.empty_like(x, content=x)
            sizes = _sizes(x.shape, of.strides(x), axis)
            if sizes is None:
                return None
        address, strides = of.address(x), of.strides(x)
    arrays, addresses = [x], [address]
    for a in activations[1:]:
        address = of.address(a)
        if a.dtype != dtype or a.shape != x.shape or not address:
            return None
        if not plan.is_dtype or of.strides(a) != strides:
            a = of.empty_like(x, content=a)
            address = of.address(a)
        arrays.append(a)
        addresses.append(address)
    for v in per_channel:
        address = of.address(v)
        if not address or v.shape != plan.shape:
            return None
        if v.dtype != of.float64 or not of.is_dense(v):
            v = of.wide(v)
            address = of.address(v)
            arrays.append(v)
        addresses.append(address)
    return _Given(of, plan, sizes, arrays, addresses)


_ARITHMETIC = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}


@lru_cache(maxsize=1024)
def _plan(
    dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> _Plan | None:
    """For such an activation; None if it is empty, or of a dtype that the loops do not know."""
    name = str(dtype).removeprefix("torch.")
    arithmetic = _ARITHMETIC.get(name)
    if arithmetic is None or 0 in shape:
        return None
    per_channel = tuple(n for i, n in enumerate(shape) if i not in axis)
    return _Plan(per_channel, arithmetic, name == arithmetic, _sizes(shape, strides, axis))


def _sizes(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """(N, C, S) of an array with these strides; None if it is not dense, or has none."""
    blocks = [(True, 1)]  # from the last in memory: whether it is reduced, and its size
    kept = []
    expected = 1
    for stride, i in sorted((strides[i], i) for i, n in enumerate(shape) if n != 1):
        if stride != expected:
            return None
        expected *= shape[i]
        reduced = i in axis
        if not reduced:
            kept.append(i)
        if blocks[-1][0] == reduced:
            blocks[-1] = (reduced, blocks[-1][1] * shape[i])
        else:
            blocks.append((reduced, shape[i]))
    if len(blocks) > 3 or kept != sorted(kept, reverse=True):
        return None
    S, C, N = [size for _, size in blocks] + [1] * (3 - len(blocks))
    return N, C, S


def _sums(name: str, given: _Given, *others: int) -> Array:
    """Two sums per channel, of each part of the samples: shape `(parts, 2, C)`, C as it came."""
    N, C, S = given.sizes
    threads = _num_threads(N * C * S)
    tasks = _tasks(N, C, S, threads, _PARTS)
    sums = given.library.zeros((tasks[-1][0] + 1, 2, *given.plan.shape))
    _run(name, given, [*others, given.library.address(sums)], 2 * C * 8, tasks, threads)
    return sums


def _elementwise(name: str, given: _Given, x: Array) -> Array:
    """An array like `x`, in its dtype."""
    dense = given.arrays[0]
    y = given.library.empty_like(dense)
    N, C, S = given.sizes
    threads = _num_threads(N * C * S)
    tasks = _tasks(N, C, S, threads, threads)
    _run(name, given, [given.library.address(y)], 0, tasks, threads)
    return y if y.dtype == x.dtype else given.library.cast(y, x.dtype)


@lru_cache(maxsize=1024)
def _tasks(N: int, C: int, S: int, threads: int, parts: int) -> list[tuple[int, ...]]:
    """Tasks `(part, n0, n1, c0, c1)`: for as many threads, or at most `parts` of the samples."""
    worth = max(N * C * S // _SHARE, 1)
    if C * S >= _WIDE:
        return [(0, 0, N, a, b) for a, b in _cuts(C, min(threads, worth))]
    return [(i, a, b, 0, C) for i, (a, b) in enumerate(_cuts(N, min(parts, worth)))]


def _cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """`range(n)` in so many parts, none of them empty."""
    parts = min(n, parts)
    return [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def _run(
    name: str, given: _Given, others: list[int], step: int, tasks: list[tuple[int, ...]],
    threads: int,
) -> None:  # fmt: skip
    """Run the loop for each task; part i of the samples writes from byte `i * step` of the last."""
    loop = _loop(name, given.plan.dtype)
    _, C, S = given.sizes
    *arrays, start = *given.addresses, *others
    if len(tasks) == 1:
        loop(*arrays, start, C, S, *tasks[0][1:])
        return

    def run(share: list[tuple[int, ...]]) -> None:
        for part, *ranges in share:
            loop(*arrays, start + part * step, C, S, *ranges)

    threads = min(threads, len(tasks))
    waited = [_pool().submit(run, tasks[i::threads]) for i in range(1, threads)]
    run(tasks[::threads])
    for other in waited:
        other.result()


@cache
def _loop(name: str, dtype: str) -> Any:
    return _loops.compiled(_loops.LOOPS[name], dtype)


def _num_threads(elements: int) -> int:
    """Threads to use for an array of so many."""
    if elements < 2 * _SHARE:
        return 1
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(asked), 1) if asked.isdigit() else os.cpu_count() or 1


# Threads of our own and not numba's: ranks may be threads, and autograd has some, while the one of
# numba's layers that is always there ends the process if two threads enter it.
@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="multibn")


if hasattr(os, "register_at_fork"):  # a forked process would find the pool without its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
