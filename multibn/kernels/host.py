"""The passes for host memory, NumPy arrays and torch tensors alike, compiled by numba.

Compiled loops see an array as an address and its sizes (N, C, S), see `_layout`. Contiguous and
channels-last activations of any number of dimensions have such sizes and are not copied. Other
strides and 16-bit dtypes are first copied to dense memory of the arithmetic dtype. An activation
without (N, C, S) goes to `generic`.

Large arrays are divided among threads: torch's number of threads, or OMP_NUM_THREADS where torch is
not loaded. How a sum is cut into parts depends on the shape alone, so its value does not depend on
the number of threads.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from multibn._arrays import array_namespace
from multibn._typing import Array
from multibn.kernels import _loops, generic
from multibn.kernels._layout import sizes_in_memory
from multibn.kernels._memory import Parameters, library_of, parameters_of, payload, scratch
from multibn.kernels.host_steps import step

_SHARE = 1 << 19  # elements that are worth a thread
_WIDE = 1 << 16  # elements of a sample from which threads divide the channels, not the samples
_PARTS = 64  # a sum over samples has at most so many parts
_FLOAT64 = 8  # bytes


def local_moments(x: Array, /, *, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """As `generic.local_moments`."""
    operands = _prepare(axis, (x,))
    if operands is None:
        return generic.local_moments(x, axis=axis)
    library = operands.library
    (mean, var), addresses = library.new(2, operands.plan.shape, library.float64)
    _moments(operands, *addresses)
    return mean, var


def begin_forward(x: Array, /, *numbers: float, axis: tuple[int, ...], **options: Any) -> Array:
    """As `generic.begin_forward`."""
    if options.get("mask") is None:
        return packed_moments(x, *numbers, axis=axis, out=options.get("out"))
    return generic.begin_forward(x, *numbers, axis=axis, **options)


finish_forward = partial(generic.finish_forward, passes=sys.modules[__name__])
begin_backward = partial(generic.begin_backward, passes=sys.modules[__name__])
finish_backward = partial(generic.finish_backward, passes=sys.modules[__name__])
move = generic.move


def packed_moments(
    x: Array, weight: float, count: float, /, *, axis: tuple[int, ...], out: Array | None = None
) -> Array:
    """As `generic.packed_moments`."""
    operands = _prepare(axis, (x,))
    if operands is None:
        return generic.begin_forward(x, weight, count, axis=axis, out=out)
    _, C, _ = operands.sizes
    packed, packed_at = payload(operands.library, C, out)
    _memory, mean_at = scratch(2 * C)
    var_at = mean_at + C * _FLOAT64
    _moments(operands, mean_at, var_at)
    step("pack_moments")(mean_at, var_at, packed_at, C, weight, count)
    return packed


def normalize(
    x: Array, /, *statistics: Any, residual: Array | None = None, relu: bool = False, **on: Any
) -> Array:
    """As `generic.normalize`."""
    y = _normalize(x, *statistics, **on)
    if residual is not None:
        y += residual
    return array_namespace(y).clip(y, 0.0, None) if relu else y


def _normalize(x: Array, /, *statistics: Any, eps: float, axis: tuple[int, ...]) -> Array:
    mean, var, weight, bias = statistics
    operands = _prepare(axis, (x,), (mean, var), (weight, bias))
    if operands is None:
        return generic.normalize(x, *statistics, eps=eps, axis=axis)
    _, C, _ = operands.sizes
    mean_at, var_at = operands.wide
    weight_at, bias_at = operands.parameters.addresses
    _memory, scale_at = scratch(2 * C)
    shift_at = scale_at + C * _FLOAT64
    step("affine", operands.parameters.dtype)(
        var_at, weight_at, bias_at, scale_at, shift_at, C, weight_at != 0, bias_at != 0, eps
    )
    return _elementwise("normalize", operands, x, [mean_at, scale_at, shift_at])


def backward_sums(
    dy: Array, x: Array, mean: Array, var: Array, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Array, Array]:
    """As `generic.backward_sums`."""
    operands = _prepare(axis, (x, dy), (mean, var))
    if operands is None:
        return generic.backward_sums(dy, x, mean, var, eps=eps, axis=axis)
    library = operands.library
    _, C, _ = operands.sizes
    mean_at, var_at = operands.wide
    _memory, sums_at, parts = _sums("backward_sums", operands, mean_at)
    (sum_dy, sum_dy_xhat), results = library.new(2, operands.plan.shape, library.float64)
    step("finish_backward_sums")(sums_at, var_at, *results, C, parts, eps)
    return sum_dy, sum_dy_xhat


def input_gradient(
    dy: Array, x: Array, /, *statistics: Any, eps: float, axis: tuple[int, ...]
) -> Array:
    """As `generic.input_gradient`."""
    mean, var, weight, element_weight, sum_dy, sum_dy_xhat = statistics
    operands = _prepare(axis, (x, dy), (mean, var, sum_dy, sum_dy_xhat), (weight,))
    if operands is None:
        return generic.input_gradient(dy, x, *statistics, eps=eps, axis=axis)
    _, C, _ = operands.sizes
    mean_at, *others = operands.wide
    (weight_at,) = operands.parameters.addresses
    _memory, first = scratch(3 * C)
    coefficients = [first, first + C * _FLOAT64, first + 2 * C * _FLOAT64]
    step("gradient_coefficients", operands.parameters.dtype)(
        *others, weight_at, *coefficients, C, weight_at != 0, eps, float(element_weight)
    )
    return _elementwise("input_gradient", operands, x, [mean_at, *coefficients])


class _Plan(NamedTuple):
    """How a pass treats all activations of one dtype, shape and strides."""

    shape: tuple[int, ...]  # of a per-channel array
    dtype: str  # of the arithmetic
    is_dtype: bool  # whether the activation has the dtype of the arithmetic
    sizes: tuple[int, int, int] | None  # (N, C, S); None if only a copy has such sizes


class _Operands(NamedTuple):
    """The arguments of a pass as addresses."""

    library: Any
    plan: _Plan
    sizes: tuple[int, int, int]  # (N, C, S)
    like: Array  # the first activation, dense
    activations: list[int]  # all in the memory order of the first
    wide: list[int]
    parameters: Parameters
    alive: list[Array]  # referred to, so that their memory is not freed


_NONE = Parameters("float64", [], ())


def _prepare(
    axis: tuple[int, ...],
    activations: Sequence[Array],
    wide: Sequence[Array] = (),
    parameters: Sequence[Array | None] = (),
) -> _Operands | None:
    """Operands of a pass, copied where needed; None if the loops cannot take them."""
    x = activations[0]
    library = library_of(x)
    address, strides = library.locate(x)
    if not address:
        return None
    plan = _plan(x.dtype, x.shape, strides, axis)
    if plan is None:
        return None
    dtype, sizes = x.dtype, plan.sizes
    if sizes is None or not plan.is_dtype:
        x = library.cast(x, plan.dtype)
        address, strides = library.locate(x)
        sizes = sizes_in_memory(x.shape, strides, axis)
        if sizes is None:
            x = library.dense_copy(x, like=x)
            address, strides = library.locate(x)
            sizes = sizes_in_memory(x.shape, strides, axis)
            if sizes is None:
                return None
    alive, addresses = [x], [address]
    for a in activations[1:]:
        address, own_strides = library.locate(a)
        if a.dtype != dtype or a.shape != x.shape or not address:
            return None
        if not plan.is_dtype or own_strides != strides:
            a = library.dense_copy(a, like=x)
            address = library.address(a)
        alive.append(a)
        addresses.append(address)
    for v in wide:
        if v.shape != plan.shape:
            return None
    wide_addresses = library.dense_addresses(wide, library.float64) if wide else []
    if wide_addresses is None:
        if not all(library.address(v) for v in wide):
            return None
        copies = [library.wide(v) for v in wide]
        wide_addresses = [library.address(v) for v in copies]
        alive += copies
    located = parameters_of(library, plan.shape, parameters) if parameters else _NONE
    if located is None:
        return None
    return _Operands(library, plan, sizes, x, addresses, wide_addresses, located, alive)


_ARITHMETIC = dict.fromkeys(("float16", "bfloat16", "float32"), "float32") | {"float64": "float64"}


@lru_cache(maxsize=1024)
def _plan(
    dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> _Plan | None:
    """The plan of an activation; None if it is empty or the loops do not know its dtype."""
    name = str(dtype).removeprefix("torch.")
    arithmetic = _ARITHMETIC.get(name)
    if arithmetic is None or 0 in shape:
        return None
    per_channel = tuple(n for i, n in enumerate(shape) if i not in axis)
    return _Plan(per_channel, arithmetic, name == arithmetic, sizes_in_memory(shape, strides, axis))


def _moments(operands: _Operands, mean_at: int, var_at: int) -> None:
    """Write the mean and the variance of the activation."""
    N, C, S = operands.sizes
    (x_at,) = operands.activations
    _loop("centre", operands.plan.dtype)(x_at, mean_at, N, C, S)
    for _ in range(2):  # a second time, about the mean, if the first centre was far from it
        _memory, sums_at, parts = _sums("moments", operands, mean_at)
        far = _loop("finish_moments", operands.plan.dtype)(
            x_at, sums_at, mean_at, var_at, N, C, S, parts
        )
        if not far:
            break


def _sums(name: str, operands: _Operands, mean_at: int) -> tuple[Any, int, int]:
    """Two sums per channel of each part of the samples: memory `(parts, 2, C)`, its address, parts.

    The caller must hold the memory while the sums are read.
    """
    N, C, S = operands.sizes
    tasks = _sum_tasks(N, C, S, _num_threads() if N * C * S >= 2 * _SHARE else 1)
    parts = tasks[0][0]
    memory, address = scratch(parts * 2 * C)
    _run(name, operands, [mean_at, address], (N, C, S), tasks)
    return memory, address, parts


def _elementwise(name: str, operands: _Operands, x: Array, coefficients: list[int]) -> Array:
    """A new array like `x`, in the dtype of `x`."""
    y, y_at = operands.library.new_like(operands.like)
    N, C, S = operands.sizes
    tasks = _tasks(N, C, S, _num_threads() if N * C * S >= 2 * _SHARE else 1)
    _run(name, operands, [*coefficients, y_at], (C, S), tasks)
    return y if operands.plan.is_dtype else operands.library.cast(y, x.dtype)


@lru_cache(maxsize=1024)
def _sum_tasks(N: int, C: int, S: int, threads: int) -> list[tuple[int, ...]]:
    """Tasks `(parts, first, step, c0, c1)`, at most one for each thread."""
    worth = max(N * C * S // _SHARE, 1)
    if C * S >= _WIDE:
        return [(1, 0, 1, a, b) for a, b in _cuts(C, min(threads, worth))]
    parts = min(_PARTS, worth, N)
    step = min(threads, parts)
    return [(parts, first, step, 0, C) for first in range(step)]


@lru_cache(maxsize=1024)
def _tasks(N: int, C: int, S: int, threads: int) -> list[tuple[int, ...]]:
    """Tasks `(n0, n1, c0, c1)`, at most one for each thread."""
    shares = min(threads, max(N * C * S // _SHARE, 1))
    if C * S >= _WIDE:
        return [(0, N, a, b) for a, b in _cuts(C, shares)]
    return [(a, b, 0, C) for a, b in _cuts(N, shares)]


def _cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """Starts and ends of at most `parts` parts of `range(n)`, none of them empty."""
    parts = min(n, parts)
    return [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def _run(
    name: str,
    operands: _Operands,
    others: list[int],
    sizes: tuple[int, ...],
    tasks: list[tuple[int, ...]],
) -> None:
    """Run the loop for each task, on one thread per task."""
    loop = _loop(name, operands.plan.dtype)
    if len(tasks) == 1:
        loop(*operands.activations, *others, *sizes, *tasks[0])
        return
    first, *rest = tasks
    running = [_pool().submit(loop, *operands.activations, *others, *sizes, *task) for task in rest]
    loop(*operands.activations, *others, *sizes, *first)
    for other in running:
        other.result()


@cache
def _loop(name: str, dtype: str) -> Any:
    return _loops.compiled(_loops.LOOPS[name], dtype)


def _num_threads() -> int:
    """Threads to use for a large array."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(asked), 1) if asked.isdigit() else os.cpu_count() or 1


# Not numba's threads: workqueue, the threading layer that numba always has, ends the process if
# two threads enter it, and ranks and autograd may be threads.
@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="multibn")


if hasattr(os, "register_at_fork"):  # a forked process has the pool but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
