"""The verbs for NumPy arrays and torch tensors in host memory: each is one call of the C core.

Python allocates the results. The core reads the fields of the arguments by name, and gets the
addresses of all arrays. The core takes dense activations of any number of dimensions, 16-bit dtypes
included, whose memory has the order (N, C, S) of `layout`; contiguous and channels-last arrays have
this order. If the core does not support an array, its function does nothing and returns None. Then
`_with_copies` calls the verb again with copies, or `reference` if there is nothing to copy. The
core divides a large array among threads.
"""

import math
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np

from multibn._arrays import array_namespace
from multibn._typing import Array
from multibn.kernels import reference, steps
from multibn.kernels.core import _core
from multibn.kernels.layout import channels, sizes
from multibn.kernels.spec import OK, Gradient, NormArgs, PackedStatistics, Running, unpack
from multibn.kernels.steps import update_running
from multibn.wire import NO_BIT

_KINDS = NormArgs, Gradient, PackedStatistics, Running
FIELDS: dict[Any, list[str]] = dict(zip(_KINDS, map(str.split, _core.fields), strict=True))


def num_threads() -> int:
    """Return how many threads share a large array: torch's number, or else OMP_NUM_THREADS."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(asked), 1) if asked.isdigit() else os.cpu_count() or 1


def _use_arrays(*of_torch: Any) -> None:
    """Register the positions of named-tuple fields and the array types with the core."""
    numbered = ((kind._make(range(len(kind._fields))), names) for kind, names in FIELDS.items())
    places = [getattr(record, name) for record, names in numbered for name in names]
    _core.use(places, num_threads, np.ndarray, *of_torch)


class _Library(NamedTuple):
    """New arrays and copies, of NumPy or of torch."""

    empty_like: Any
    contiguous: Any
    strides: Any
    numbers: Any  # allocates an array of a shape, float64 unless a dtype is passed
    mark_changed: Any  # takes tensors that the core has changed in place; for NumPy a no-op


_NUMPY = _Library(np.empty_like, np.ascontiguousarray, attrgetter("strides"), np.empty, bool)


def _library_of(kind: type) -> _Library:
    """Return the library of a type of arrays."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(kind, torch.Tensor):
        return _NUMPY
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    _use_arrays(torch.Tensor, torch.nn.Parameter, exchange)

    # The default device may be a GPU.
    numbers = partial(torch.empty, dtype=torch.float64, device="cpu")
    of_tensor = torch.Tensor.contiguous, torch.Tensor.stride
    return _Library(torch.empty_like, *of_tensor, numbers, torch._C._increment_version)


_library: Any = cache(_library_of)
_use_arrays(None, None, None)


@lru_cache(maxsize=1024)
def _statistics_like(
    numbers: Any, shape: tuple[int, ...], axis: tuple[int, ...]
) -> PackedStatistics:
    """Return a template for `empty_like`, which takes half the time of `empty`."""
    per_channel = channels(shape, axis)
    return PackedStatistics(numbers(2 * math.prod(per_channel) + 2), per_channel)


@lru_cache(maxsize=1024)
def _rows_like(
    numbers: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: Any, num_rows: int
) -> Array:
    """Return a template for `empty_like`: `num_rows` coefficients per channel."""
    like = numbers(0, dtype=dtype)
    arithmetic = reference.arithmetic_dtype(array_namespace(like), dtype)
    return numbers((num_rows, *channels(shape, axis)), dtype=arithmetic)


def begin_forward(
    args: NormArgs,
    rank_weight: float,
    count: float,
    mark: float = NO_BIT,
    *,
    out: Array | None = None,
) -> Array:
    """Implement `reference.begin_forward`."""
    payload = (
        _library(type(args.x)).numbers(sizes(args.x.shape, args.axis)[2]) if out is None else out
    )
    numbers = rank_weight, count, mark
    if _core.begin_forward(args, payload, *numbers) is None:
        return _with_copies(begin_forward, args, *numbers, out=out)
    return payload


def finish_forward(
    args: NormArgs, summed: Array, rank_weight: float, count: float, *, coefficients: bool = False
) -> tuple[Array, PackedStatistics, int]:
    """Implement `reference.finish_forward`."""
    library, message = _library(type(args.x)), (summed, rank_weight, count)
    new = library.empty_like
    like, per_channel = _statistics_like(library.numbers, args.x.shape, args.axis)
    batch = tuple.__new__(PackedStatistics, (new(like), per_channel))  # runs no Python code
    x, axis = args.x, args.axis
    out = new(_rows_like(library.numbers, x.shape, axis, x.dtype, 3) if coefficients else x)
    state, running = _core.finish_forward(args, batch, out, coefficients, *message), args.running
    if state is None:
        out, batch, state = _with_copies(finish_forward, args, *message, coefficients=coefficients)
        if running is not None and state == OK:
            update_running(running, *unpack(batch)[:3], count)
    elif running is not None:  # the core has updated them
        mean, var, _, _, counter = running
        library.mark_changed((mean, var) if counter is None else (mean, var, counter))
    return out, batch, state


def begin_backward(g: Gradient, *, out: Array | None = None) -> tuple[Any, ...]:
    """Implement `reference.begin_backward`; also return `g`, copied where the core needs it."""
    args = g.input
    library = _library(type(args.x))
    payload = library.numbers(sizes(args.x.shape, args.axis)[3]) if out is None else out
    dweight = None if args.weight is None else library.empty_like(args.weight)
    dbias = None if args.bias is None else library.empty_like(args.bias)
    if _core.begin_backward(g, payload, dweight, dbias) is None:
        return _with_copies(begin_backward, g, out=out)
    return payload, dweight, dbias, g


def finish_backward(
    g: Gradient, summed: Array, copied: Gradient | None = None, *, coefficients: bool = False
) -> tuple[Array, Array | None]:
    """Implement `reference.finish_backward`."""
    if copied is not None:
        library = _library(type(copied.input.x))
        new = library.empty_like
        x, axis = copied.input.x, copied.input.axis
        out = new(_rows_like(library.numbers, x.shape, axis, x.dtype, 4) if coefficients else x)
        dresidual = None if g.y is None or coefficients else new(out)
        if _core.finish_backward(copied, summed, out, coefficients, dresidual) is not None:
            return out, dresidual
    return reference.finish_backward(g, summed, coefficients=coefficients)


def parameter_gradients(
    summed: Array, g: Gradient, *, divisor: float
) -> tuple[Array | None, Array | None]:
    """Implement `steps.parameter_gradients`."""
    if type(summed) is not np.ndarray or type(g.dy) is not np.ndarray:
        return steps.parameter_gradients(summed, g, divisor=divisor)
    weight, bias, means, C = g.input.weight, g.input.bias, summed / divisor, summed.size // 2
    return (
        None if weight is None else means[C:].astype(weight.dtype).reshape(weight.shape),
        None if bias is None else means[:C].astype(bias.dtype).reshape(bias.shape),
    )


def normalize(args: NormArgs, batch: PackedStatistics, *, coefficients: bool = False) -> Array:
    """Implement `reference.normalize`."""
    x, library = args.x, _library(type(args.x))
    like = _rows_like(library.numbers, x.shape, args.axis, x.dtype, 3) if coefficients else x
    out = library.empty_like(like)
    if _core.normalize(args, batch, out, coefficients) is None:
        return _with_copies(normalize, args, batch, coefficients=coefficients)
    return out


def _with_copies(verb: Callable[..., Any], a: Any, *others: Any, **options: Any) -> Any:
    """Call `verb` with arrays copied to the memory layout of `x`, and without running statistics.

    If `a` is like this already, call the verb of `reference`.
    """
    args = getattr(a, "input", a)
    library = _library(type(args.x))

    def copy(v: Any) -> Any:
        if v is None:
            return v
        like = args.x[tuple(map(slice, v.shape))]  # a mask has one channel
        new = library.empty_like(like, dtype=v.dtype)
        is_lazy = getattr(v, "is_neg", bool)()  # torch: the memory holds the negated numbers
        if library.strides(new) == library.strides(v) and not is_lazy:
            return v
        new[...] = v
        return new

    weight = None if args.weight is None else library.contiguous(args.weight)
    bias = None if args.bias is None else library.contiguous(args.bias)
    x, residual, mask = map(copy, (args.x, args.residual, args.mask))
    of_input = {"weight": weight, "bias": bias, "residual": residual, "mask": mask}
    dense: Any = args._replace(x=x, **of_input, running=None)
    is_same = all(map(is_, dense, args))
    if a is not args:
        dense = a._replace(dy=copy(a.dy), input=dense, y=copy(a.y))
        is_same = is_same and dense.dy is a.dy and dense.y is a.y
    if is_same:
        verb, dense = getattr(reference, verb.__name__), a
    return verb(dense, *others, **options)
