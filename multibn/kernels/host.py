"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

The loops of `_core` see an array as an address and its sizes (N, C, S), see `_layout`. Contiguous
and channels-last activations of any number of dimensions have such sizes and are not copied, 16-bit
dtypes neither. Other strides are first copied to dense memory. An activation without (N, C, S) goes
to `generic`, and so do masks.

Large arrays are divided among threads: torch's number of threads, or OMP_NUM_THREADS where torch is
not loaded. How a sum is cut into parts depends on the shape alone, so its value does not depend on
the number of threads.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

from multibn import message
from multibn._typing import Array
from multibn.kernels import _core, generic
from multibn.kernels._layout import sizes_in_memory
from multibn.kernels._memory import DTYPES, code_of, library_of, scratch
from multibn.kernels.generic import RIGHT, Finished, Running

_SHARE = 1 << 19  # elements that are worth a thread
_WIDE = 1 << 16  # elements of a sample from which threads divide the channels, not the samples
_PARTS = 64  # a sum over samples has at most so many parts
_FLOAT64 = 8  # bytes
_MOMENTS, _GRADIENT, _SIGN_OF_X, _SIGN_OF_Y = range(4)  # kinds of sums, see _core.c
_CONVENTIONS = {"unbiased_global": 0, "unbiased_local": 1, "biased": 2}

move = generic.move


def begin_forward(
    x: Array,
    rank_weight: float,
    count: float,
    /,
    *,
    axis: tuple[int, ...],
    mask: Array | None = None,
    out: Array | None = None,
) -> Array:
    """As `generic.begin_forward`."""
    o = None if mask is not None else _operands(axis, (x,))
    if o is None:
        return generic.begin_forward(x, rank_weight, count, axis=axis, mask=mask, out=out)
    N, C, S = o.plan.sizes
    payload, payload_at = _payload(o, message.forward_payload(C), out)
    dtype, (x_at,), tasks = o.plan.dtype, o.activations, _sum_tasks(o.plan)
    parts, packing = tasks[0][0], (payload_at, rank_weight, count)
    if len(tasks) == 1:
        _core.begin_forward(dtype, x_at, N, C, S, parts, 0, 0, 0, 0, *packing)
        return payload
    _memory, mean_at = scratch(2 * C)
    for again in (0, 1):  # a second time, about the mean, if the first centre was far from it
        statistics = mean_at if again else 0, 0, 0, 0, 0, 0.0
        arguments = dtype, _MOMENTS, x_at, 0, 0, N, C, S, *statistics
        _sums_memory, sums_at = _sums(arguments, C, tasks)
        written = sums_at, mean_at, mean_at + C * _FLOAT64, again, *packing
        if not _core.begin_forward(dtype, x_at, N, C, S, parts, *written):
            break
    return payload


def finish_forward(
    summed: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    rank_weight: float,
    count: float,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
    mask: Array | None = None,
    running: Running | None = None,
) -> Finished:
    """As `generic.finish_forward`."""
    activations = (x,) if residual is None else (x, residual)
    o = None if mask is not None else _operands(axis, activations, (), (weight, bias))
    source = library_of(summed)
    summed_at = None if o is None else source.dense(summed.shape, source.float64, summed)
    if o is None or summed_at is None:
        on: Any = {"eps": eps, "axis": axis, "residual": residual, "relu": relu, "mask": mask}
        share = rank_weight, count
        return generic.finish_forward(summed, x, weight, bias, *share, running=running, **on)
    plan, library = o.plan, o.library
    statistics, (mean_at, var_at, *totals_at) = library.new(
        library.float64, plan.shape, plan.shape, (), ()
    )
    y, y_at = library.new_like(o.like)
    tasks = _tasks(plan)
    arguments = (
        plan.dtype, relu, o.activations[0], o.activations[1] if residual is not None else 0, y_at,
        mean_at, var_at, *o.parameters, eps, *plan.sizes[1:],
    )  # fmt: skip
    moved = _NOT_MOVED if running is None else _moved(running, o)
    state = _core.finish_forward(
        *arguments, *(tasks[0] if len(tasks) == 1 else (0, 0, 0, 0)),
        *summed_at, rank_weight, count, *totals_at, *(moved or _NOT_MOVED),
    )  # fmt: skip
    if state == RIGHT:
        if len(tasks) > 1:
            _run(_core.normalize, arguments, tasks)
        if running is not None:
            if moved is None:
                generic.move(running, *statistics[:3], count)
            else:
                library.changed(running.mean, running.var, running.num_batches)
    return y, *statistics, state


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
) -> tuple[Array, Array | None, Array | None]:
    """As `generic.begin_backward`."""
    activations = (x, dy) if y is None else (x, dy, y)
    o = None if mask is not None else _operands(axis, activations, (mean, var), (weight, bias))
    if o is None:
        on: Any = {"eps": eps, "axis": axis, "relu": relu, "y": y, "mask": mask, "out": out}
        return generic.begin_backward(dy, x, mean, var, weight, bias, **on)
    plan, library = o.plan, o.library
    C = plan.sizes[1]
    payload, payload_at = _payload(o, message.backward_payload(C), out)
    gradients: list[Any] = [None, None]
    addresses = [0, 0]
    for i, p in enumerate((weight, bias)):
        if p is not None:
            (gradients[i],), (addresses[i],) = library.new(o.parameter_dtype, plan.shape)
    arguments = (
        plan.dtype, _kind(relu, y), *o.activations[:2], 0 if y is None else o.activations[2],
        *plan.sizes, *o.wide, *o.parameters, eps,
    )  # fmt: skip
    tasks = _sum_tasks(plan)
    _memory, sums_at = _sums(arguments, C, tasks)
    whole = tasks[0][0], 0, 1, 0, C
    _core.begin_backward(*arguments, sums_at, *whole, payload_at, *addresses)
    for i, p in enumerate((weight, bias)):
        if p is not None and p.dtype != o.parameter_dtype:
            gradients[i] = library.cast(gradients[i], p.dtype)
    return payload, *gradients


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
) -> tuple[Array, Array | None]:
    """As `generic.finish_backward`."""
    activations = (x, dy) if y is None else (x, dy, y)
    o = None if mask is not None else _operands(axis, activations, (mean, var), (weight, bias))
    source = library_of(summed)
    summed_at = None if o is None else source.dense(summed.shape, source.float64, summed)
    if o is None or summed_at is None:
        on: Any = {"eps": eps, "axis": axis, "relu": relu, "y": y, "mask": mask}
        arguments: Any = (summed, dy, x, mean, var, weight, bias, element_weight)
        return generic.finish_backward(*arguments, **on)
    plan, new_like = o.plan, o.library.new_like
    dx, dx_at = new_like(o.like)
    dresidual, dresidual_at = (None, 0) if y is None else new_like(o.like)
    arguments = (
        plan.dtype, _kind(relu, y), *o.activations[:2], 0 if y is None else o.activations[2],
        dx_at, dresidual_at, *o.wide, *o.parameters, eps,
        *summed_at, float(element_weight), *plan.sizes[1:],
    )  # fmt: skip
    _run(_core.finish_backward, arguments, _tasks(plan))
    return dx, dresidual


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
    """As `generic.normalize`."""
    activations = (x,) if residual is None else (x, residual)
    o = _operands(axis, activations, (mean, var), (weight, bias))
    if o is None:
        on: Any = {"eps": eps, "axis": axis, "residual": residual, "relu": relu}
        return generic.normalize(x, mean, var, weight, bias, **on)
    plan = o.plan
    y, y_at = o.library.new_like(o.like)
    arguments = (
        plan.dtype, relu, o.activations[0], o.activations[1] if residual is not None else 0, y_at,
        *o.wide, *o.parameters, eps, *plan.sizes[1:],
    )  # fmt: skip
    _run(_core.normalize, arguments, _tasks(plan))
    return y


class _Plan(NamedTuple):
    """How a pass treats all activations of one dtype, shape and strides."""

    shape: tuple[int, ...]  # of a per-channel array
    dtype: int  # see `DTYPES`
    sizes: tuple[int, int, int]  # (N, C, S)
    is_large: bool  # whether several threads are worthwhile


class _Operands(NamedTuple):
    """The arguments of a pass as addresses."""

    library: Any
    plan: _Plan
    like: Array  # the first activation, dense
    activations: Sequence[int]  # all in the memory order of the first
    wide: Sequence[int]
    parameters: Sequence[int]  # of weight and bias, 0 for None, and the number of their dtype
    parameter_dtype: Any
    alive: Sequence[Any]  # referred to, so that copies are not freed


def _operands(
    axis: tuple[int, ...],
    activations: tuple[Array, ...],
    wide: tuple[Array, ...] = (),
    parameters: tuple[Array | None, Array | None] = (None, None),
) -> _Operands | None:
    """Operands of a pass, copied where needed; None if the loops cannot take them."""
    like = activations[0]
    library = library_of(like)
    located = library.locate(*activations)
    if located is None:
        return None
    addresses, strides = located
    plan = _plan(like.dtype, like.shape, strides[0], axis)
    alive: list[Any] = []
    if plan is None or any(s != strides[0] for s in strides):
        if code_of(like.dtype) is None or 0 in like.shape:
            return None
        if plan is None:
            like = library.dense_copy(like, like=like)
        alive = [library.dense_copy(a, like=like) for a in activations[1:]]
        addresses, strides = library.locate(like, *alive)
        plan = _plan(like.dtype, like.shape, strides[0], axis)
        if plan is None:
            return None
    wide_at = library.dense(plan.shape, library.float64, *wide) if wide else ()
    if wide_at is None:
        copies = [library.wide(v) for v in wide]
        alive += copies
        wide_at = library.dense(plan.shape, library.float64, *copies)
        if wide_at is None:
            return None
    weight, bias = parameters
    dtype = library.float64
    if weight is not None:
        dtype = weight.dtype
    elif bias is not None:
        dtype = bias.dtype
    code = code_of(dtype)
    at = None if code is None else library.dense(plan.shape, dtype, weight, bias)
    if at is None:
        if not all(p is None or library.locate(p) for p in parameters):
            return None
        dtype, code = library.float64, DTYPES["float64"]
        copies = [None if p is None else library.wide(p) for p in parameters]
        alive += copies
        at = library.dense(plan.shape, dtype, *copies)
        if at is None:
            return None
    return _Operands(library, plan, like, addresses, wide_at, (*at, code), dtype, alive)


@lru_cache(maxsize=1024)
def _plan(
    dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> _Plan | None:
    """The plan of an activation; None if it has no sizes (N, C, S), or another dtype."""
    code = code_of(dtype)
    sizes = None if code is None or 0 in shape else sizes_in_memory(shape, strides, axis)
    if code is None or sizes is None:
        return None
    N, C, S = sizes
    per_channel = tuple(n for i, n in enumerate(shape) if i not in axis)
    return _Plan(per_channel, code, sizes, N * C * S >= 2 * _SHARE)


def _payload(o: _Operands, n: int, out: Array | None) -> tuple[Array, int]:
    """`out`, or a new array for the `n` numbers of a message; and its address."""
    if out is not None:
        return out, library_of(out).dense((n,), out.dtype, out)[0]
    (array,), (address,) = o.library.new(o.library.float64, (n,))
    return array, address


_NOT_MOVED = (0, 0, 0, 0.0, 0, 0)


def _moved(running: Running, o: _Operands) -> tuple[Any, ...] | None:
    """Running statistics for the C core; None if it cannot move them."""
    mean, var, momentum, convention, num_batches = running
    library = o.library
    dtype = mean.dtype
    code = code_of(dtype)
    at = library.dense(o.plan.shape, dtype, mean, var, written=True)
    counter_at = library.dense((), library.int64, num_batches, written=True)
    if code is None or at is None or counter_at is None or convention not in _CONVENTIONS:
        return None
    if momentum is None:
        momentum = 0.0 if num_batches is None else -1.0
    return *at, code, momentum, _CONVENTIONS[convention], *counter_at


def _kind(relu: bool, y: Array | None) -> int:
    if y is not None:
        return _SIGN_OF_Y
    return _SIGN_OF_X if relu else _GRADIENT


def _sums(arguments: tuple[Any, ...], C: int, tasks: Sequence[tuple[int, ...]]) -> tuple[Any, int]:
    """Memory of the sums of each part and its address, if threads made them; else None and 0.

    The caller must hold the memory while the sums are read.
    """
    if len(tasks) == 1:
        return None, 0
    memory, address = scratch(tasks[0][0] * 2 * C)
    _run(_core.sums, (*arguments, address), tasks)
    return memory, address


def _sum_tasks(plan: _Plan) -> Sequence[tuple[int, ...]]:
    return _sum_tasks_of(plan.sizes, _num_threads() if plan.is_large else 1)


@lru_cache(maxsize=1024)
def _sum_tasks_of(sizes: tuple[int, int, int], threads: int) -> Sequence[tuple[int, ...]]:
    """Tasks `(parts, first, step, c0, c1)`, at most one for each thread."""
    N, C, S = sizes
    worth = max(N * C * S // _SHARE, 1)
    if C * S >= _WIDE:
        return [(1, 0, 1, a, b) for a, b in _cuts(C, min(threads, worth))]
    parts = min(_PARTS, worth, N)
    step = min(threads, parts)
    return [(parts, first, step, 0, C) for first in range(step)]


def _tasks(plan: _Plan) -> Sequence[tuple[int, ...]]:
    return _tasks_of(plan.sizes, _num_threads() if plan.is_large else 1)


@lru_cache(maxsize=1024)
def _tasks_of(sizes: tuple[int, int, int], threads: int) -> Sequence[tuple[int, ...]]:
    """Tasks `(n0, n1, c0, c1)`, at most one for each thread."""
    N, C, S = sizes
    shares = min(threads, max(N * C * S // _SHARE, 1))
    if C * S >= _WIDE:
        return [(0, N, a, b) for a, b in _cuts(C, shares)]
    return [(a, b, 0, C) for a, b in _cuts(N, shares)]


def _cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """Starts and ends of at most `parts` parts of `range(n)`, none of them empty."""
    parts = min(n, parts)
    return [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def _run(
    loop: Callable[..., Any], arguments: tuple[Any, ...], tasks: Sequence[tuple[int, ...]]
) -> None:
    """Run the loop for each task, on one thread per task."""
    first, *rest = tasks
    running = [_pool().submit(loop, *arguments, *task) for task in rest]
    loop(*arguments, *first)
    for other in running:
        other.result()


def _num_threads() -> int:
    """Threads to use for a large array."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(asked), 1) if asked.isdigit() else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="multibn")


if hasattr(os, "register_at_fork"):  # a forked process has the pool but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
