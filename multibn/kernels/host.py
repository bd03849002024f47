"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

Python makes the results, and the core reads the fields of the arguments by name and finds out where
all arrays lie. The core takes dense activations of any number of dimensions, 16-bit dtypes
included, whose memory has the order (N, C, S) of `layout`: contiguous and channels-last ones have
this order. Where a function of the core cannot take an array, the function does nothing and returns
the name of the array's field, of which `_with_copies` makes a dense copy; or None, and `generic`
computes. The core divides a large array among threads.
"""

from collections.abc import Callable
from typing import Any

from multibn._typing import Array
from multibn.kernels import generic
from multibn.kernels.arguments import (
    RIGHT,
    BatchStatistics,
    Gradient,
    Input,
    Running,
    asks_more,
    other_fields,
)
from multibn.kernels.core import _core
from multibn.kernels.core.memory import LIBRARIES
from multibn.kernels.layout import sizes

move = generic.move


def use_fields(*records: Any) -> None:
    """Tell the core where the named tuples have the fields that the core reads."""
    known = list(zip(records, map(str.split, _core.fields), strict=True))
    others = tuple(other_fields(kind, *names) for kind, names in known)
    places = [kind._fields.index(name) for kind, names in known for name in names]
    _core.use_fields(records, places, others, asks_more)


use_fields(Input, Gradient, BatchStatistics, Running)


def begin_forward(i: Input, rank_weight: float, count: float, *, out: Array | None = None) -> Array:
    """As `generic.begin_forward`."""
    payload = LIBRARIES[type(i.x)].numbers(sizes(i.x.shape, i.axis)[2]) if out is None else out
    numbers = payload, rank_weight, count
    done = _core.begin_forward(i, *numbers)
    if type(done) is str:
        done, _ = _with_copies(_core.begin_forward, done, i, *numbers)
    return generic.begin_forward(i, rank_weight, count, out=out) if done is None else payload


def finish_forward(
    i: Input, summed: Array, rank_weight: float, count: float
) -> tuple[Array, BatchStatistics, int]:
    """As `generic.finish_forward`."""
    library = LIBRARIES[type(i.x)]
    y, batch = library.empty_like(i.x), library.statistics(i.x, i.axis)
    message = summed, rank_weight, count
    state, dense = _core.finish_forward(i, batch, y, *message), i
    if type(state) is str:
        state, dense = _with_copies(_core.finish_forward, state, i, batch, y, *message)
    if state is None:
        return generic.finish_forward(i, *message)
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
    done, dense = _core.begin_backward(g, *results), g
    if type(done) is str:
        done, dense = _with_copies(_core.begin_backward, done, g, *results)
    if done is None:
        return generic.begin_backward(g, out=out)
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
    done = _core.finish_backward(dense, *numbers)
    if type(done) is str:
        done, _ = _with_copies(_core.finish_backward, done, dense, *numbers)
    return generic.finish_backward(g, summed) if done is None else (dx, dresidual)


def normalize(i: Input, batch: BatchStatistics) -> Array:
    """As `generic.normalize`."""
    library = LIBRARIES[type(i.x)]
    y = library.empty_like(i.x)
    done = _core.normalize(i, batch, y)
    if type(done) is str:
        done, _ = _with_copies(_core.normalize, done, i, _wide(batch, library), y)
    return generic.normalize(i, batch) if done is None else y


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
        return a._replace(**{name: library.contiguous(value)})
    like = i.x[tuple(map(slice, value.shape))]  # a mask has one channel
    copy = library.empty_like(like, dtype=value.dtype)
    copy[...] = value
    return a._replace(**{name: copy})


def _wide(batch: BatchStatistics, library: Any) -> BatchStatistics:
    mean, var = (library.contiguous(generic.as_wide(v)) for v in batch[:2])
    return batch._replace(mean=mean, var=var)
