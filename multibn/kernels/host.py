"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

The loops of `_core` see an array as an address and its sizes (N, C, S), see `_layout`. Contiguous
and channels-last activations of any number of dimensions have such sizes and are not copied, 16-bit
dtypes neither. Other strides are first copied to dense memory. A mask is a byte for each of the N
times S elements. An activation without (N, C, S) goes to `generic`. Large arrays are divided among
threads, see `_threads`.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multibn._typing import Array
from multibn.kernels import _core, generic
from multibn.kernels._layout import sizes_in_memory
from multibn.kernels._memory import DTYPES, LIBRARIES, addressof, at_start, code_of, scratch
from multibn.kernels._threads import SHARE, num_threads, run, sum_tasks, tasks
from multibn.kernels.generic import RIGHT, Finished, Running
from multibn.message import forward_payload

_FLOAT64 = 8  # bytes
_MOMENTS, _GRADIENT, _SIGN_OF_X, _SIGN_OF_Y = range(4)  # kinds of sums, see _core.c
# Of a pass, by whether a ReLU came last, and whether the output is there.
_KINDS = {
    (False, False): _GRADIENT,
    (False, True): _SIGN_OF_Y,
    (True, False): _SIGN_OF_X,
    (True, True): _SIGN_OF_Y,
}
_CONVENTIONS = {"unbiased_global": 0, "unbiased_local": 1, "biased": 2}

move = generic.move


def begin_forward(
    x: Array,
    /,
    *share: float,
    axis: tuple[int, ...],
    mask: Array | None = None,
    out: Array | None = None,
) -> Array:
    """As `generic.begin_forward`."""
    o = _operands(axis, (x, None), mask)
    if o is None:
        return generic.begin_forward(x, *share, axis=axis, mask=mask, out=out)
    library, plan, (x_at, _, mask_at, *_), _, _alive = o
    N, C, S = plan.sizes
    parts = plan.sums if plan.sums is not None else sum_tasks(plan.sizes, num_threads())
    payload, payload_at = _payload(library, out, plan.length)
    head, packing = (plan.dtype, x_at, mask_at, N, C, S, parts[0][0]), (payload_at, *share)
    if len(parts) == 1:
        _core.begin_forward(*head, 0, 0, 0, 0, *packing)
        return payload
    _memory, mean_at = scratch(2 * C)
    for again in (0, 1):  # a second time, about the mean, if the first centre was far from it
        statistics = mean_at if again else 0, 0, 0, 0, 0, 0.0
        _sums_memory, sums_at = _sums(
            (plan.dtype, _MOMENTS, x_at, 0, 0, mask_at, *statistics, N, C, S), C, parts
        )
        written = sums_at, mean_at, mean_at + C * _FLOAT64, again
        if not _core.begin_forward(*head, *written, *packing):
            break
    return payload


def finish_forward(
    summed: Array,
    x: Array,
    /,
    *parameters_and_share: Any,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
    mask: Array | None = None,
    running: Running | None = None,
) -> Finished:
    """As `generic.finish_forward`."""
    weight, bias, rank_weight, count = parameters_and_share
    o = _operands(axis, (x, residual), mask, (), (weight, bias))
    summed_at = None if o is None else _message(summed, o[1].length)
    if o is None or summed_at is None:
        on: Any = {"residual": residual, "relu": relu, "mask": mask, "running": running}
        return generic.finish_forward(summed, x, *parameters_and_share, eps=eps, axis=axis, **on)
    library, plan, (x_at, residual_at, mask_at, *parameters), _, (like, *_alive) = o
    shape = plan.shape
    statistics, (mean_at, var_at, *totals_at) = library.new(library.float64, shape, shape, (), ())
    y = library.empty_like(like)
    parts = plan.tasks if plan.tasks is not None else tasks(plan.sizes, num_threads())
    arguments = (
        plan.dtype, relu, x_at, residual_at, mask_at, mean_at, var_at, *parameters, eps,
        library.address(y), *plan.sizes[1:],
    )  # fmt: skip
    moved = _NOT_MOVED if running is None else _moved(running, library, shape)
    state = _core.finish_forward(
        *arguments, *(parts[0] if len(parts) == 1 else _NOTHING),
        summed_at, rank_weight, count, *totals_at, *(moved or _NOT_MOVED),
    )  # fmt: skip
    if state == RIGHT:
        if len(parts) > 1:
            run(_core.normalize, arguments, parts)
        if running is not None and moved is not None:
            library.changed(running.mean, running.var, running.num_batches)
        elif running is not None:
            mean, var, total, _ = statistics
            generic.move(running, mean, var, total, count)
    return y, *statistics, state


def begin_backward(
    dy: Array,
    x: Array,
    /,
    *statistics: Any,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    mask: Array | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """As `generic.begin_backward`."""
    mean, var, weight, bias = statistics
    o = _operands(axis, (x, dy, y), mask, (mean, var), (weight, bias))
    if o is None:
        on: Any = {"relu": relu, "y": y, "mask": mask, "out": out}
        return generic.begin_backward(dy, x, *statistics, eps=eps, axis=axis, **on)
    library, plan, addresses, dtype, _alive = o
    _, C, _ = plan.sizes
    payload, payload_at = _payload(library, out, 2 * C)
    (dweight, dbias), gradients_at = library.new(dtype, plan.shape, plan.shape)
    arguments = plan.dtype, _KINDS[relu, y is not None], *addresses, eps, *plan.sizes
    parts = plan.sums if plan.sums is not None else sum_tasks(plan.sizes, num_threads())
    _memory, sums_at = (None, 0) if len(parts) == 1 else _sums(arguments, C, parts)
    whole = parts[0][0], 0, 1, 0, C
    _core.begin_backward(*arguments, sums_at, *whole, payload_at, *gradients_at)
    if weight is None:
        dweight = None
    elif weight.dtype != dtype:
        dweight = library.cast(dweight, weight.dtype)
    if bias is None:
        dbias = None
    elif bias.dtype != dtype:
        dbias = library.cast(dbias, bias.dtype)
    return payload, dweight, dbias


def finish_backward(
    summed: Array,
    dy: Array,
    x: Array,
    /,
    *statistics: Any,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array | None]:
    """As `generic.finish_backward`."""
    mean, var, weight, bias, element_weight = statistics
    o = _operands(axis, (x, dy, y), mask, (mean, var), (weight, bias))
    summed_at = None if o is None else _message(summed, 2 * o[1].sizes[1])
    if o is None or summed_at is None:
        on: Any = {"relu": relu, "y": y, "mask": mask}
        return generic.finish_backward(summed, dy, x, *statistics, eps=eps, axis=axis, **on)
    library, plan, addresses, _, (like, *_alive) = o
    dx = library.empty_like(like)
    dresidual = None if y is None else library.empty_like(like)
    arguments = (
        plan.dtype, _KINDS[relu, y is not None], *addresses, eps, summed_at, float(element_weight),
        library.address(dx), 0 if dresidual is None else library.address(dresidual),
        *plan.sizes[1:],
    )  # fmt: skip
    if plan.tasks is not None:
        _core.finish_backward(*arguments, *plan.tasks[0])
    else:
        run(_core.finish_backward, arguments, tasks(plan.sizes, num_threads()))
    return dx, dresidual


def normalize(
    x: Array,
    /,
    *statistics: Any,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
) -> Array:
    """As `generic.normalize`."""
    o = _operands(axis, (x, residual), None, statistics[:2], statistics[2:])
    if o is None:
        on: Any = {"residual": residual, "relu": relu}
        return generic.normalize(x, *statistics, eps=eps, axis=axis, **on)
    library, plan, addresses, _, (like, *_alive) = o
    y = library.empty_like(like)
    arguments = plan.dtype, relu, *addresses, eps, library.address(y), *plan.sizes[1:]
    parts = plan.tasks if plan.tasks is not None else tasks(plan.sizes, num_threads())
    run(_core.normalize, arguments, parts)
    return y


class _Plan(NamedTuple):
    """How a pass treats all activations of one dtype, shape and strides."""

    shape: tuple[int, ...]  # of a per-channel array
    dtype: int  # see `DTYPES`
    sizes: tuple[int, int, int]  # (N, C, S)
    order: tuple[int, ...]  # of the axes in memory
    sums: Sequence[tuple[int, ...]] | None  # the task of one thread; None where more may help
    tasks: Sequence[tuple[int, ...]] | None
    length: int  # of a forward payload


@lru_cache(maxsize=1024)
def _plan(
    dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> _Plan | None:
    """The plan of an activation; None if it has no sizes (N, C, S), or another dtype."""
    code = code_of(dtype)
    if code is None or 0 in shape:
        return None
    if isinstance(dtype, np.dtype):  # whose arrays count strides in bytes
        strides = tuple(s // dtype.itemsize for s in strides)
    sizes = sizes_in_memory(shape, strides, axis)
    if sizes is None:
        return None
    per_channel = tuple(n for i, n in enumerate(shape) if i not in axis)
    order = tuple(sorted(range(len(shape)), key=lambda i: -strides[i]))
    length = forward_payload(sizes[1])
    if math.prod(sizes) >= 2 * SHARE:
        return _Plan(per_channel, code, sizes, order, None, None, length)
    return _Plan(per_channel, code, sizes, order, sum_tasks(sizes, 1), tasks(sizes, 1), length)


# The library; the plan; the addresses of activations, mask and per-channel arrays, 0 for None, and
# the number of the parameters' dtype; this dtype; the first activation, dense, and all other
# copies, which live as long as they are referred to.
_Operands: TypeAlias = tuple[Any, _Plan, list[int], Any, list[Array]]


def _operands(
    axis: tuple[int, ...],
    activations: tuple[Array | None, ...],
    mask: Array | None,
    wide: tuple[Array, ...] = (),
    parameters: tuple[Array | None, ...] = (None, None),
) -> _Operands | None:
    """Operands of a pass, copied where needed; None if the loops cannot take them."""
    x: Any = activations[0]
    library = LIBRARIES[type(x)]
    if library is None:
        return None
    weight, bias = parameters
    dtype = weight.dtype if weight is not None else bias.dtype if bias is not None else None
    code = 0 if dtype is None else code_of(dtype)
    strides = library.strides(x)
    plan = _plan(x.dtype, x.shape, strides, axis)
    if plan is not None and code is not None:
        flat = None if mask is None else library.flat(mask, plan.order)
        addresses = library.locate(
            (activations, x.dtype, x.shape, strides),
            ((flat,), library.bool, (plan.sizes[0] * plan.sizes[2],), None),
            (wide, library.float64, plan.shape, None),
            (parameters, dtype, plan.shape, None),
        )
        if addresses is not None:
            addresses.append(code)
            return library, plan, addresses, dtype or library.float64, [x, flat]
    return _copied(library, axis, activations, mask, wide, parameters)


def _copied(
    library: Any,
    axis: tuple[int, ...],
    activations: tuple[Array | None, ...],
    mask: Array | None,
    wide: tuple[Array, ...],
    parameters: tuple[Array | None, ...],
) -> _Operands | None:
    """As `_operands`, of dense copies."""
    x, *others = activations
    if library.locate(((x,), x.dtype, x.shape, library.strides(x))) is None:  # type: ignore[union-attr]
        return None
    if code_of(x.dtype) is None or 0 in x.shape:  # type: ignore[union-attr]
        return None
    for a in others:
        if a is not None and (a.dtype != x.dtype or a.shape != x.shape):  # type: ignore[union-attr]
            return None
    like = library.dense_copy(x, like=x)
    strides = library.strides(like)
    plan = _plan(like.dtype, like.shape, strides, axis)
    if plan is None or any(v is not None and v.shape != plan.shape for v in (*wide, *parameters)):
        return None
    activations = (like, *[None if a is None else library.dense_copy(a, like=like) for a in others])
    flat = None if mask is None else library.flat(mask, plan.order)
    wide = tuple(library.wide(v) for v in wide)
    parameters = tuple(None if p is None else library.wide(p) for p in parameters)
    float64 = library.float64
    addresses = library.locate(
        (activations, like.dtype, like.shape, strides),
        ((flat,), library.bool, (plan.sizes[0] * plan.sizes[2],), None),
        ((*wide, *parameters), float64, plan.shape, None),
    )
    if addresses is None:
        return None
    addresses.append(DTYPES["float64"])
    alive = [like, *activations, flat, *wide, *parameters]
    return library, plan, addresses, float64, alive


def _payload(library: Any, out: Array | None, n: int) -> tuple[Array, int]:
    """Memory for the `n` numbers of a message, and its address."""
    if out is None:
        (payload,), (address,) = library.new(library.float64, (n,))
        return payload, address
    return out, addressof(at_start(out))


def _message(summed: Array, n: int) -> int | None:
    """The address of a message of `n` numbers; None if the loops cannot read it."""
    if type(summed) is np.ndarray and summed.flags.carray:  # a line's memory, located faster
        is_message = summed.dtype == np.float64 and summed.shape == (n,)
        return addressof(at_start(summed)) if is_message else None
    library = LIBRARIES[type(summed)]
    if library is None:
        return None
    addresses = library.locate(((summed,), library.float64, (n,), None))
    return None if addresses is None else int(addresses[0])


_NOTHING = (0, 0, 0, 0)
_NOT_MOVED = (0, 0, 0, 0.0, 0, 0)


def _moved(running: Running, library: Any, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Running statistics for the C core; None if it cannot move them."""
    mean, var, momentum, convention, num_batches = running
    code = code_of(mean.dtype)
    addresses = library.locate(
        ((mean, var), mean.dtype, shape, None), ((num_batches,), library.int64, (), None)
    )
    if code is None or addresses is None or convention not in _CONVENTIONS:
        return None
    if isinstance(mean, np.ndarray) and not (mean.flags.writeable and var.flags.writeable):
        return None
    if momentum is None:
        momentum = 0.0 if num_batches is None else -1.0
    mean_at, var_at, counter_at = addresses
    return mean_at, var_at, code, momentum, _CONVENTIONS[convention], counter_at


def _sums(arguments: tuple[Any, ...], C: int, parts: Sequence[tuple[int, ...]]) -> tuple[Any, int]:
    """Memory of the sums of each part, which threads make, and its address.

    The caller must hold the memory while the sums are read.
    """
    memory, address = scratch(parts[0][0] * 2 * C)
    run(_core.sums, (*arguments, address), parts)
    return memory, address
