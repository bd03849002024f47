"""The verbs for host memory, NumPy arrays and torch tensors alike, by the C core: one call each.

Python makes the results, and the core finds out where all arrays lie. The core takes dense
activations of any number of dimensions, 16-bit dtypes included, whose memory has the order
(N, C, S) of `_layout`: contiguous and channels-last ones have this order. A function of the core
returns None for arrays that the function cannot take: these are copied to dense memory, if that
helps, or go to `generic`. For a large array, which threads may share (`_threads`), the function
returns the sizes (N, C, S).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from multibn._typing import Array
from multibn.kernels import _core, generic
from multibn.kernels._memory import LIBRARIES, channels
from multibn.kernels._threads import num_threads, run, sum_tasks, tasks
from multibn.kernels.generic import RIGHT, Finished, Running
from multibn.message import backward_payload, forward_payload

_FLOAT64 = 8  # bytes
_NOTHING = 0, 0, 0, 1  # a task without samples
_UNMOVED = Running(None, None, None)
_ACTIVATIONS = ("residual", "y")  # among the options of a verb

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
    payload = out
    if out is None:
        payload = library.numbers(forward_payload(math.prod(channels(x.shape, axis))))
    rows = None if mask is None else library.flat(mask, x)
    done = _core.begin_forward(x, axis, rows, payload, *share, None)
    if type(done) is tuple:
        _begin_forward_in_threads(x, axis, rows, (payload, *share), done)
    elif done is None:
        on = {"axis": axis, "mask": mask, "out": out}
        return _elsewhere(begin_forward, "a--", (x, *share), on)
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
    tail = summed, *share, count, element_weight, *(running or _UNMOVED)
    state = _core.finish_forward(*head, None, *tail)
    if type(state) is tuple:
        parts = tasks(state, num_threads())
        state = _core.finish_forward(*head, _NOTHING, *tail)
        if state == RIGHT:
            _run(_core.normalize, head, parts)
    elif state is None:
        on: Any = {"eps": eps, "axis": axis, "residual": residual, "relu": relu, "mask": mask}
        arguments = summed, x, *parameters_and_share
        if running is None:
            return _elsewhere(finish_forward, "-app--", arguments, on)
        finished = finish_forward(*arguments, **on)
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
    # To make the output again, of which a ReLU's gradient takes the sign.
    parameters = (weight, bias) if relu else (None, None)
    head = x, axis, dy, y, rows, mean, var, *parameters, eps, relu
    written = payload, dweight, dbias
    done = _core.begin_backward(*head, 0, None, *written)
    if type(done) is tuple:
        parts = sum_tasks(done, num_threads())
        _memory, sums_at = _sums(head, done, parts)
        _core.begin_backward(*head, sums_at, (parts[0][0], 0, 1, 0, 0), *written)
    elif done is None:
        on = {"eps": eps, "axis": axis, "relu": relu, "y": y, "mask": mask, "out": out}
        return _elsewhere(begin_backward, "aawwpp", (dy, x, *statistics), on)
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
        on = {"eps": eps, "axis": axis, "relu": relu, "y": y, "mask": mask}
        return _elsewhere(finish_backward, "-aawwpp-", (summed, dy, x, *statistics), on)
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
        on = {"eps": eps, "axis": axis, "residual": residual, "relu": relu}
        return _elsewhere(normalize, "awwpp", (x, *statistics), on)
    return y


def _elsewhere(verb: Any, letters: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """`verb` of copies that the core takes, or of `generic` where no copy helps.

    `letters` are those of `_arguments.h`, for each of the arguments; the last activation is x.
    """
    x, axis = arguments[letters.rindex("a")], options["axis"]
    library = LIBRARIES[type(x)]
    like = x if _core.fits(x, axis, None, None, None) else library.dense_copy(x, x)

    def copied(letter: str, a: Any) -> Any:
        if letter == "-" or _core.fits(like, axis, *[a if letter == k else None for k in "awp"]):
            return a
        if letter != "a":
            return library.contiguous(a, wide=letter == "w")
        return library.dense_copy(a, like) if (a.dtype, a.shape) == (x.dtype, x.shape) else a

    if _core.fits(like, axis, None, None, None):
        copies = list(map(copied, letters, arguments))
        others = {k: copied("a" if k in _ACTIVATIONS else "-", v) for k, v in options.items()}
        pairs = zip((*copies, *others.values()), (*arguments, *options.values()), strict=True)
        if any(copy is not a for copy, a in pairs):
            return verb(*copies, **others)
    return getattr(generic, verb.__name__)(*arguments, **options)


def _run(loop: Any, arguments: tuple[Any, ...], parts: Sequence[tuple[int, ...]]) -> None:
    """Run a function of the core for each task, on one thread per task."""
    run(loop, arguments, [(part,) for part in parts])  # type: ignore[misc]


def _begin_forward_in_threads(
    x: Array, axis: tuple[int, ...], rows: Any, written: Any, sizes: tuple[int, int, int]
) -> None:
    """`_core.begin_forward` of a large array."""
    parts, C = sum_tasks(sizes, num_threads()), sizes[1]
    mean = np.empty((2, C))  # and variance
    mean_at = mean.ctypes.data
    for again in (0, 1):  # a second time, about the mean, if the first centre was far from it
        head = x, axis, None, None, rows, mean_at if again else 0, 0, None, None, 0.0, 0
        _sums_memory, sums_at = _sums(head, sizes, parts)
        task = parts[0][0], sums_at, mean_at, mean_at + C * _FLOAT64, again
        if not _core.begin_forward(x, axis, rows, *written, task):
            break


def _sums(
    head: tuple[Any, ...], sizes: tuple[int, int, int], parts: Sequence[tuple[int, ...]]
) -> tuple[Any, int]:
    """The sums of each part, which threads make, and their address."""
    memory = np.empty(parts[0][0] * 2 * sizes[1])
    _run(_core.sums, (*head, memory.ctypes.data), parts)
    return memory, memory.ctypes.data
