"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

Python makes the results, and the core reads the fields of the arguments by name and finds out where
all arrays lie. The core takes dense activations of any number of dimensions, 16-bit dtypes
included, whose memory has the order (N, C, S) of `layout`: contiguous and channels-last ones have
this order. Where a function of the core cannot take an array, the function does nothing and returns
None: `_with_copies` tries once more, and `generic` computes what is left. The core divides a large
array among threads.
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
    done = _core.begin_forward(i, payload, rank_weight, count)
    if done is None:
        _, done = _with_copies(_core.begin_forward, i, payload, rank_weight, count)
    return generic.begin_forward(i, rank_weight, count, out=out) if done is None else payload


def finish_forward(
    i: Input, summed: Array, rank_weight: float, count: float
) -> tuple[Array, BatchStatistics, int]:
    """As `generic.finish_forward`."""
    library = LIBRARIES[type(i.x)]
    y, batch = library.empty_like(i.x), library.statistics(i.x, i.axis)
    message = summed, rank_weight, count
    taken, state = i, _core.finish_forward(i, batch, y, *message)
    if state is None:
        taken, state = _with_copies(_core.finish_forward, i, batch, y, *message)
    if state is None:
        return generic.finish_forward(i, *message)
    running = i.running
    if taken.running is not None:
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
    taken, done = g, _core.begin_backward(g, payload, dweight, dbias)
    if done is None:
        taken, done = _with_copies(_core.begin_backward, g, payload, dweight, dbias)
    if done is None:
        return generic.begin_backward(g, out=out)
    return payload, dweight, dbias, taken


def finish_backward(
    g: Gradient, summed: Array, taken: Gradient | None = None
) -> tuple[Array, Array | None]:
    """As `generic.finish_backward`."""
    taken = taken or g
    library = LIBRARIES[type(taken.input.x)]
    dx = library.empty_like(taken.input.x)
    dresidual = None if g.y is None else library.empty_like(dx)
    done = _core.finish_backward(taken, summed, dx, dresidual)
    if done is None:
        _, done = _with_copies(_core.finish_backward, taken, summed, dx, dresidual)
    return generic.finish_backward(g, summed) if done is None else (dx, dresidual)


def normalize(i: Input, batch: BatchStatistics) -> Array:
    """As `generic.normalize`."""
    y = LIBRARIES[type(i.x)].empty_like(i.x)
    done = _core.normalize(i, batch, y)
    if done is None:
        _, done = _with_copies(_core.normalize, i, batch, y)
    return generic.normalize(i, batch) if done is None else y


def _with_copies(function: Callable[..., Any], a: Any, *others: Any) -> Any:
    """`a` with copies of arrays not in the memory order of `x`; what `function` returns for these.

    No running statistics are moved.
    """
    i = getattr(a, "input", a)
    library = LIBRARIES[type(i.x)]

    def copy(v: Any) -> Any:
        if v is None:
            return v
        like = i.x[tuple(map(slice, v.shape))]  # a mask has one channel
        new = library.empty_like(like, dtype=v.dtype)
        is_lazy = getattr(v, "is_neg", bool)()  # torch's, whose memory has the numbers' negatives
        if library.strides(new) == library.strides(v) and not is_lazy:
            return v
        new[...] = v
        return new

    weight = None if i.weight is None else library.contiguous(i.weight)
    bias = None if i.bias is None else library.contiguous(i.bias)
    x, residual, mask = map(copy, (i.x, i.residual, i.mask))
    of_input = {"weight": weight, "bias": bias, "residual": residual, "mask": mask}
    dense: Any = i._replace(x=x, **of_input, running=None)
    if a is not i:
        dense = a._replace(dy=copy(a.dy), input=dense, y=copy(a.y))
    return dense, function(dense, *others)
