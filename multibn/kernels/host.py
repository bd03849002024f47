"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

Python makes the results, and the core reads the fields of the arguments by name and finds out where
all arrays lie. The core takes dense activations of any number of dimensions, 16-bit dtypes
included, whose memory has the order (N, C, S) of `layout`: contiguous and channels-last ones have
this order. Where a function of the core cannot take an array, the function does nothing and returns
the name of the array's field, of which `_with_copies` makes a dense copy; or None, and `generic`
computes. For a large array, which threads may share (`threads`), the function returns the sizes
(N, C, S).
"""

from collections.abc import Callable, Sequence
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

_core.use_fields(Input, Gradient, BatchStatistics, Running)

move = generic.move


def begin_forward(i: Input, rank_weight: float, count: float, *, out: Array | None = None) -> Array:
    """As `generic.begin_forward`."""
    payload = LIBRARIES[type(i.x)].numbers(sizes(i.x.shape, i.axis)[2]) if out is None else out
    numbers = payload, rank_weight, count
    done, dense = _core.begin_forward(i, *numbers, None), i
    if type(done) is str:
        done, dense = _with_copies(_core.begin_forward, done, i, *numbers, None)
    if done is None:
        return generic.begin_forward(i, rank_weight, count, out=out)
    if type(done) is tuple:
        _begin_forward_in_threads(dense, numbers, done)
    return payload


def finish_forward(
    i: Input, summed: Array, rank_weight: float, count: float
) -> tuple[Array, BatchStatistics, int]:
    """As `generic.finish_forward`."""
    library = LIBRARIES[type(i.x)]
    y, batch = library.empty_like(i.x), library.statistics(i.x, i.axis)
    message = summed, rank_weight, count
    state, dense = _core.finish_forward(i, batch, y, None, *message), i
    if type(state) is str:
        state, dense = _with_copies(_core.finish_forward, state, i, batch, y, None, *message)
    if state is None:
        return generic.finish_forward(i, *message)
    if type(state) is tuple:
        parts = tasks(state, num_threads())
        state = _core.finish_forward(dense, batch, y, _NOTHING, *message)
        if state == RIGHT:
            run(_core.normalize, (dense, batch, y), parts)
    running = i.running
    if dense.running is not None:
        library.changed(running.mean, running.var, running.num_batches)
    elif running is not None and state == RIGHT:
        move(running, batch.mean, batch.var, batch.count, count)
    return y, batch, state


def begin_backward(g: Gradient, *, out: Array | None = None) -> tuple[Any, ...]:
    """As `generic.begin_backward`; also returns `g` with copies, if the core needs these."""
    i = g.input
    library = LIBRARIES[type(i.x)]
    payload = library.numbers(sizes(i.x.shape, i.axis)[3]) if out is None else out
    dweight = None if i.weight is None else library.empty_like(i.weight)
    dbias = None if i.bias is None else library.empty_like(i.bias)
    results = payload, dweight, dbias
    done, dense = _core.begin_backward(g, *results, None), g
    if type(done) is str:
        done, dense = _with_copies(_core.begin_backward, done, g, *results, None)
    if done is None:
        return generic.begin_backward(g, out=out)
    if type(done) is tuple:
        parts = sum_tasks(done, num_threads())
        memory = _sums(dense, 0, done, parts)
        _core.begin_backward(dense, *results, (parts[0][0], memory.ctypes.data))
    return results if dense is g else (*results, dense)


def finish_backward(
    g: Gradient, summed: Array, dense: Gradient | None = None
) -> tuple[Array, Array | None]:
    """As `generic.finish_backward`."""
    dense = dense or g
    library = LIBRARIES[type(dense.input.x)]
    dx = library.empty_like(dense.input.x)
    dresidual = None if g.y is None else library.empty_like(dx)
    numbers = summed, dx, dresidual
    done = _core.finish_backward(dense, *numbers, None)
    if type(done) is str:
        done, dense = _with_copies(_core.finish_backward, done, dense, *numbers, None)
    if done is None:
        return generic.finish_backward(g, summed)
    if type(done) is tuple:
        run(_core.finish_backward, (dense, *numbers), tasks(done, num_threads()))
    return dx, dresidual


def normalize(i: Input, batch: BatchStatistics) -> Array:
    """As `generic.normalize`."""
    library = LIBRARIES[type(i.x)]
    y = library.empty_like(i.x)
    done, dense, wide = _core.normalize(i, batch, y, None), i, batch
    if type(done) is str:
        wide = _wide(batch, library)
        done = _core.normalize(i, wide, y, None)
        done, dense = _with_copies(_core.normalize, done, i, wide, y, None)
    if done is None:
        return generic.normalize(i, batch)
    if type(done) is tuple:
        run(_core.normalize, (dense, wide, y), tasks(done, num_threads()))
    return y


def _with_copies(function: Callable[..., Any], done: Any, a: Any, *others: Any) -> Any:
    """The result of a function of the core for `a` with copies of the fields that the core refuses.

    `done` is the first refused field. The result is None where no copy helps. Also returns `a` with
    the copies.
    """
    copied: set[str] = set()
    while type(done) is str and done not in copied:
        copied.add(done)
        a = _with_copy(a, done)
        done = function(a, *others)
    return None if type(done) is str else done, a


def _with_copy(a: Any, name: str) -> Any:
    """`a` with a copy of a field, of its own or of its `Input`; without running statistics."""
    if name == "running":
        return a._replace(running=None)
    i = a if isinstance(a, Input) else a.input
    library = LIBRARIES[type(i.x)]
    if name == "batch":
        return a if a is i else a._replace(batch=_wide(a.batch, library))
    if name not in a._fields:
        return a._replace(input=_with_copy(i, name))
    value = getattr(a, name)
    if name in ("weight", "bias"):
        return a._replace(**{name: library.contiguous(value, wide=False)})
    return a._replace(**{name: library.dense_copy(value, i.x)})


def _wide(batch: BatchStatistics, library: Any) -> BatchStatistics:
    mean, var = (library.contiguous(v, wide=True) for v in batch[:2])
    return batch._replace(mean=mean, var=var)


def _begin_forward_in_threads(i: Input, numbers: Any, sizes: tuple[int, int, int]) -> None:
    """`_core.begin_forward` of a large array."""
    parts, C = sum_tasks(sizes, num_threads()), sizes[1]
    mean = np.empty((2, C))  # and variance
    mean_at = mean.ctypes.data
    for again in (0, 1):  # a second time, about the mean, if the first centre was far from it
        memory = _sums(i, mean_at if again else 0, sizes, parts)
        task = parts[0][0], memory.ctypes.data, mean_at, mean_at + C * _FLOAT64, again
        if not _core.begin_forward(i, *numbers, task):
            break


def _sums(
    a: Input | Gradient, mean_at: int, sizes: tuple[int, int, int], parts: Sequence[tuple[int, ...]]
) -> Any:
    """The sums of each part, which threads make: about the mean at an address, if there is one."""
    memory = np.empty(parts[0][0] * 2 * sizes[1])
    run(_core.sums, (a, mean_at, memory.ctypes.data), parts)
    return memory
