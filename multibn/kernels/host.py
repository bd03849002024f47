"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

Python makes the results. The core finds out where all arrays lie (`_locate.h`), and takes dense
activations of any number of dimensions, 16-bit dtypes included, whose memory has the order (N, C, S)
of `_layout`: contiguous and channels-last ones have. It returns None for arrays that it cannot
take: these are copied to dense memory, if that helps, or go to `generic`. For a large array, which
threads may share (`_threads`), it returns the sizes (N, C, S).
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

from multibn._typing import Array
from multibn.kernels import _core, generic
from multibn.kernels._memory import LIBRARIES, channels, scratch
from multibn.kernels._threads import num_threads, run, sum_tasks, tasks
from multibn.kernels.generic import RIGHT, Finished, Running
from multibn.message import backward_payload, forward_payload

_FLOAT64 = 8  # bytes
_NOTHING = 0, 0, 0, 1  # a task without samples

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
    library = LIBRARIES[type(x)]
    if out is None:
        payload = library.numbers(forward_payload(math.prod(channels(x.shape, axis))))
    else:
        payload = out
    rows = None if mask is None else library.flat(mask, x)
    written = payload, *share
    done = _core.begin_forward(x, axis, rows, *written, None)
    if type(done) is tuple:
        _begin_forward_in_threads(x, axis, rows, written, done)
    elif done is None:
        dense = _dense(library, axis, (x,))
        k: Any = generic.begin_forward if dense is None else begin_forward
        return k(*(dense or (x,)), *share, axis=axis, mask=mask, out=out)
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
    weight, bias, *share = parameters_and_share
    library = LIBRARIES[type(x)]
    y = library.empty_like(x)
    mean, var, count, element_weight = statistics = library.statistics(x, axis)
    rows = None if mask is None else library.flat(mask, x)
    head = x, axis, residual, rows, mean, var, weight, bias, eps, relu, y
    tail = summed, *share, count, element_weight, running
    state = _core.finish_forward(*head, None, *tail)
    if type(state) is tuple:
        parts = tasks(state, num_threads())
        if len(parts) == 1:
            state = _core.finish_forward(*head, parts[0], *tail)
        else:
            state = _core.finish_forward(*head, _NOTHING, *tail)
            if state == RIGHT:
                _run(_core.normalize, head, parts)
    elif state is None:
        on: Any = {"eps": eps, "axis": axis, "relu": relu, "mask": mask}
        dense = _dense(library, axis, (x, residual), (), (weight, bias))
        if dense is not None:
            x, residual, weight, bias = dense
            on |= {"residual": residual, "running": running}
            return finish_forward(summed, x, weight, bias, *share, **on)
        on["residual"] = residual
        if running is None:
            return generic.finish_forward(summed, x, weight, bias, *share, **on)
        # The core may be unable to move these.
        finished = finish_forward(summed, x, weight, bias, *share, **on)
        if finished[-1] == RIGHT:
            generic.move(running, *finished[1:4], share[1])
        return finished
    if running is not None:
        library.changed(running.mean, running.var, running.num_batches)
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
    library = LIBRARIES[type(x)]
    payload = library.numbers(backward_payload(math.prod(mean.shape))) if out is None else out
    dweight = None if weight is None else library.empty_like(weight)
    dbias = None if bias is None else library.empty_like(bias)
    rows = None if mask is None else library.flat(mask, x)
    head = x, axis, dy, y, rows, mean, var, weight, bias, eps, relu
    written = payload, dweight, dbias
    done = _core.begin_backward(*head, 0, None, *written)
    if type(done) is tuple:
        parts = sum_tasks(done, num_threads())
        _memory, sums_at = (None, 0) if len(parts) == 1 else _sums(head, done, parts)
        _core.begin_backward(*head, sums_at, (parts[0][0], 0, 1, 0, 0), *written)
    elif done is None:
        on: Any = {"eps": eps, "axis": axis, "relu": relu, "mask": mask, "out": out}
        dense = _dense(library, axis, (x, dy, y), (mean, var), (weight, bias))
        if dense is None:
            return generic.begin_backward(dy, x, *statistics, y=y, **on)
        x, dy, y, *statistics = dense  # type: ignore[assignment]
        return begin_backward(dy, x, *statistics, y=y, **on)
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
    *per_channel, element_weight = statistics
    library = LIBRARIES[type(x)]
    dx = library.empty_like(x)
    dresidual = None if y is None else library.empty_like(x)
    rows = None if mask is None else library.flat(mask, x)
    arguments = (
        x, axis, dy, y, rows, *per_channel, eps, relu, summed, element_weight, dx, dresidual
    )  # fmt: skip
    done = _core.finish_backward(*arguments, None)
    if type(done) is tuple:
        _run(_core.finish_backward, arguments, tasks(done, num_threads()))
    elif done is None:
        on: Any = {"eps": eps, "axis": axis, "relu": relu, "mask": mask}
        dense = _dense(library, axis, (x, dy, y), per_channel[:2], per_channel[2:])
        if dense is None:
            return generic.finish_backward(summed, dy, x, *statistics, y=y, **on)
        x, dy, y, *per_channel = dense
        return finish_backward(summed, dy, x, *per_channel, element_weight, y=y, **on)
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
    library = LIBRARIES[type(x)]
    y = library.empty_like(x)
    arguments = x, axis, residual, None, *statistics, eps, relu, y
    done = _core.normalize(*arguments, None)
    if type(done) is tuple:
        _run(_core.normalize, arguments, tasks(done, num_threads()))
    elif done is None:
        dense = _dense(library, axis, (x, residual), statistics[:2], statistics[2:])
        if dense is None:
            on: Any = {"residual": residual, "relu": relu}
            return generic.normalize(x, *statistics, eps=eps, axis=axis, **on)
        x, residual, *statistics = dense  # type: ignore[assignment]
        return normalize(x, *statistics, eps=eps, axis=axis, residual=residual, relu=relu)
    return y


def _dense(
    library: Any,
    axis: tuple[int, ...],
    activations: Sequence[Array | None],
    wide: Sequence[Array] = (),
    parameters: Sequence[Array | None] = (),
) -> list[Array | None] | None:
    """All these arrays, copied where the core cannot take them; None if copies do not help."""
    arrays = [*activations, *wide, *parameters]
    x: Any = activations[0]
    if _core.fits(x, axis, None, None, None) is None:
        x = library.dense_copy(x, x)
        if _core.fits(x, axis, None, None, None) is None:
            return None
    copies = [x]
    for a in activations[1:]:
        if a is not None and _core.fits(x, axis, a, None, None) is None:
            if a.dtype != x.dtype or a.shape != x.shape:
                return None
            a = library.dense_copy(a, x)
        copies.append(a)
    for v in wide:
        taken = _core.fits(x, axis, None, v, None)
        copies.append(library.contiguous(v, wide=True) if taken is None else v)
    for p in parameters:
        taken = _core.fits(x, axis, None, None, p)
        copies.append(library.contiguous(p, wide=False) if taken is None else p)
    return None if all(map(operator.is_, arrays, copies)) else copies


def _run(loop: Any, arguments: tuple[Any, ...], parts: Sequence[tuple[int, ...]]) -> None:
    """Run a function of the core for each task, on one thread per task."""
    run(loop, arguments, [(part,) for part in parts])  # type: ignore[misc]


def _begin_forward_in_threads(
    x: Array, axis: tuple[int, ...], rows: Any, written: Any, sizes: tuple[int, int, int]
) -> None:
    """`_core.begin_forward` of a large array."""
    parts, C = sum_tasks(sizes, num_threads()), sizes[1]
    num = parts[0][0]
    if len(parts) == 1:
        _core.begin_forward(x, axis, rows, *written, (num, 0, 0, 0, 0))
        return
    _memory, mean_at = scratch(2 * C)
    for again in (0, 1):  # a second time, about the mean, if the first centre was far from it
        head = x, axis, None, None, rows, mean_at if again else 0, 0, None, None, 0.0, 0
        _sums_memory, sums_at = _sums(head, sizes, parts)
        task = num, sums_at, mean_at, mean_at + C * _FLOAT64, again
        if not _core.begin_forward(x, axis, rows, *written, task):
            break


def _sums(
    head: tuple[Any, ...], sizes: tuple[int, int, int], parts: Sequence[tuple[int, ...]]
) -> tuple[Any, int]:
    """Memory of the sums of each part, which threads make, and its address.

    The caller must hold the memory while the sums are read.
    """
    memory, address = scratch(parts[0][0] * 2 * sizes[1])
    _run(_core.sums, (*head, address), parts)
    return memory, address
