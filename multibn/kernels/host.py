"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

Python makes the results, and the core finds out where all arrays lie. The core takes dense
activations of any number of dimensions, 16-bit dtypes included, whose memory has the order
(N, C, S) of `layout`: contiguous and channels-last ones have this order. A function of the core
returns None for arrays that the function cannot take: these are copied to dense memory, if that
helps, or go to `generic`. For a large array, which threads may share (`threads`), the function
returns the sizes (N, C, S).
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np

from multibn._typing import Array
from multibn.kernels import generic
from multibn.kernels.arguments import RIGHT, BatchStatistics, Gradient, Input, Running
from multibn.kernels.core import _core
from multibn.kernels.core.memory import LIBRARIES
from multibn.kernels.core.threads import num_threads, run, sum_tasks, tasks
from multibn.kernels.layout import sizes

_FLOAT64 = 8  # bytes
_NOTHING = 0, 0, 0, 1  # a task without samples
_UNMOVED = Running(None, None, None)
# The kind of array that the core takes for each name, see `_arguments.h`.
_KINDS = dict.fromkeys(("x", "dy", "y", "residual"), "a")
_KINDS |= dict.fromkeys(("weight", "bias"), "p") | dict.fromkeys(("mean", "var"), "w")
_KINDS["mask"] = "m"

move = generic.move


def begin_forward(i: Input, rank_weight: float, count: float, *, out: Array | None = None) -> Array:
    """As `generic.begin_forward`."""
    x, _, _, _, axis, _, _, _, mask = i
    library = LIBRARIES[type(x)]
    payload = library.numbers(sizes(x.shape, axis)[2]) if out is None else out
    done = _core.begin_forward(x, axis, mask, payload, rank_weight, count, None)
    if type(done) is tuple:
        _begin_forward_in_threads(x, axis, mask, (payload, rank_weight, count), done)
    elif done is None:
        return _elsewhere(begin_forward, i, rank_weight, count, out=out)
    return payload


def finish_forward(i: Input, summed: Array, *share: float) -> tuple[Array, BatchStatistics, int]:
    """As `generic.finish_forward`."""
    x, weight, bias, eps, axis, residual, relu, running, mask = i
    library = LIBRARIES[type(x)]
    y = library.empty_like(x)
    batch = mean, var, count, element_weight = library.statistics(x, axis)
    head = x, axis, residual, mask, mean, var, weight, bias, eps, relu, y
    tail = summed, *share, count, element_weight, *(running or _UNMOVED)
    state = _core.finish_forward(*head, None, *tail)
    if type(state) is tuple:
        parts = tasks(state, num_threads())
        state = _core.finish_forward(*head, _NOTHING, *tail)
        if state == RIGHT:
            run(_core.normalize, head, parts)
    elif state is None:
        if running is None:
            return _elsewhere(finish_forward, i, summed, *share)
        y, batch, state = finish_forward(i._replace(running=None), summed, *share)
        if state == RIGHT:
            generic.move(running, *batch[:3], share[1])
        return y, batch, state
    if running is not None:
        library.changed(running.mean, running.var, running.num_batches)
    return y, batch, state


def begin_backward(
    g: Gradient, *, out: Array | None = None
) -> tuple[Array, Array | None, Array | None]:
    """As `generic.begin_backward`."""
    dy, x, weight, bias, (mean, var, _, _), eps, axis, relu, y, mask, _ = g
    library = LIBRARIES[type(x)]
    payload = library.numbers(sizes(x.shape, axis)[3]) if out is None else out
    dweight = None if weight is None else library.empty_like(weight)
    dbias = None if bias is None else library.empty_like(bias)
    # To make the output again, of which a ReLU's gradient takes the sign.
    parameters = (weight, bias) if relu else (None, None)
    head = x, axis, dy, y, mask, mean, var, *parameters, eps, relu
    written = payload, dweight, dbias
    done = _core.begin_backward(*head, 0, None, *written)
    if type(done) is tuple:
        parts = sum_tasks(done, num_threads())
        _memory, sums_at = _sums(head, done, parts)
        _core.begin_backward(*head, sums_at, (parts[0][0], 0, 1, 0, 0), *written)
    elif done is None:
        return _elsewhere(begin_backward, g, out=out)
    return payload, dweight, dbias


def finish_backward(g: Gradient, summed: Array) -> tuple[Array, Array | None]:
    """As `generic.finish_backward`."""
    dy, x, weight, bias, (mean, var, _, element_weight), eps, axis, relu, y, mask, _ = g
    library = LIBRARIES[type(x)]
    dx = library.empty_like(x)
    dresidual = None if y is None else library.empty_like(x)
    read = x, axis, dy, y, mask, mean, var, weight, bias, eps, relu, summed, element_weight
    arguments = *read, dx, dresidual
    done = _core.finish_backward(*arguments, None)
    if type(done) is tuple:
        run(_core.finish_backward, arguments, tasks(done, num_threads()))
    elif done is None:
        return _elsewhere(finish_backward, g, summed)
    return dx, dresidual


def normalize(i: Input, batch: BatchStatistics) -> Array:
    """As `generic.normalize`."""
    x, weight, bias, eps, axis, residual, relu, _, mask = i
    library = LIBRARIES[type(x)]
    y = library.empty_like(x)
    arguments = x, axis, residual, mask, batch.mean, batch.var, weight, bias, eps, relu, y
    done = _core.normalize(*arguments, None)
    if type(done) is tuple:
        run(_core.normalize, arguments, tasks(done, num_threads()))
    elif done is None:
        return _elsewhere(normalize, i, batch)
    return y


def _elsewhere(verb: Any, i: Input | Gradient, *others: Any, **options: Any) -> Any:
    """`verb` of copies that the core takes, or of `generic` where no copy helps."""
    library = LIBRARIES[type(i.x)]
    like = i.x if _fits(i.x, i.axis) else library.dense_copy(i.x, i.x)

    def copied(name: str, a: Any) -> Any:
        if isinstance(a, Input | Gradient | BatchStatistics):
            fields = type(a)(*map(copied, a._fields, a))
            return a if all(map(is_, fields, a)) else fields
        kind = _KINDS.get(name)
        if a is None or kind is None or _fits(like, i.axis, kind, a):
            return a
        if kind in "wp":
            return library.contiguous(a, wide=kind == "w")
        copy = library.dense_copy(a, like)
        return copy if _fits(like, i.axis, kind, copy) else a

    if _fits(like, i.axis):
        copies = [copied("", a) for a in (i, *others)]
        if not all(map(is_, copies, (i, *others))):
            return verb(*copies, **options)
    return getattr(generic, verb.__name__)(i, *others, **options)


def _fits(like: Array, axis: tuple[int, ...], kind: str = "", a: Array | None = None) -> bool:
    """Whether the core takes `like` for the activation, and with it `a`, an array of this kind."""
    return bool(_core.fits(like, axis, *[a if kind == k else None for k in "amwp"]))


def _begin_forward_in_threads(
    x: Array, axis: tuple[int, ...], mask: Any, written: Any, sizes: tuple[int, int, int]
) -> None:
    """`_core.begin_forward` of a large array."""
    parts, C = sum_tasks(sizes, num_threads()), sizes[1]
    mean = np.empty((2, C))  # and variance
    mean_at = mean.ctypes.data
    for again in (0, 1):  # a second time, about the mean, if the first centre was far from it
        head = x, axis, None, None, mask, mean_at if again else 0, 0, None, None, 0.0, 0
        _sums_memory, sums_at = _sums(head, sizes, parts)
        task = parts[0][0], sums_at, mean_at, mean_at + C * _FLOAT64, again
        if not _core.begin_forward(x, axis, mask, *written, task):
            break


def _sums(
    head: tuple[Any, ...], sizes: tuple[int, int, int], parts: Sequence[tuple[int, ...]]
) -> tuple[Any, int]:
    """The sums of each part, which threads make, and their address."""
    memory = np.empty(parts[0][0] * 2 * sizes[1])
    run(_core.sums, (*head, memory.ctypes.data), parts)
    return memory, memory.ctypes.data
