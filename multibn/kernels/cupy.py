"""The verbs for CuPy arrays, as CUDA kernels: two launches each.

Activations are read as often as must be: forward once for the moments and once for the output,
backward twice for the sums and twice for the gradient. No pass makes a temporary of the size of an
activation. Arithmetic is in float64, in registers only.

The kernels (`_cupy`) take activations that have sizes (N, C, S), see `layout`. Masks and
everything else go to `generic`. Results do not depend on the order in which blocks run.
"""

from typing import Any

import cupy
import numpy as np

from multibn import message
from multibn._typing import Array
from multibn.kernels import generic
from multibn.kernels.arguments import RIGHT, BatchStatistics, Gradient, Input, Running
from multibn.kernels.cupy_launch import TYPES, Kernels, Plan, plan_of


def begin_forward(i: Input, weight: float, count: float, /, *, out: Any = None) -> Array:
    """As `generic.begin_forward`; two launches."""
    plan = plan_of(i.x, i.axis)
    if plan is None or i.mask is not None or out is not None:
        return generic.begin_forward(i, weight, count, out=out)
    packed = _wide(message.forward_payload(plan.C))
    run = Kernels(plan, i.x.dtype)
    partials = _wide(2, plan.splits, plan.C)
    run("moments", plan.split_grid, i.x, partials, *plan.sizes, plan.length, np.uint32(plan.cols))
    numbers = np.float64(weight), np.float64(count), np.float64(plan.N * plan.S)
    run("pack", plan.merge_grid, partials, i.x, packed, *numbers, plan.C, plan.S, plan.num_splits)
    return packed


def finish_forward(
    i: Input, summed: Array, rank_weight: float, count: float, /
) -> tuple[Array, BatchStatistics, int]:
    """As `generic.finish_forward`; two launches."""
    x, weight, bias, eps, axis, _, _, running, _ = i
    plan = plan_of(x, axis)
    if plan is None or not isinstance(summed, cupy.ndarray) or not _fit_input(plan, i):
        return generic.finish_forward(i, summed, rank_weight, count)
    state = generic.state(summed, count)
    batch = BatchStatistics(*(_wide(*shape) for shape in (plan.shape, plan.shape, (), ())))
    scale, shift = _wide(plan.C), _wide(plan.C)
    running = running if state == RIGHT else None
    fits = running is not None and _fit_running(plan, running)
    moved, numbers = _moved(running if fits else None, count)
    run = Kernels(plan, x.dtype, parameter=_dtype(weight, bias), running=_dtype(*moved[:2]))
    floats = map(np.float64, (rank_weight, max(count, 1.0), eps, *numbers))
    arrays = summed, weight, bias, *moved, *batch, scale, shift
    run("unpack", plan.channel_grid, *arrays, *floats, plan.C)
    if running is not None and not fits:
        move(running, *batch[:3], count)
    return _normalized(run, i, batch.mean, scale, shift), batch, state


def begin_backward(g: Gradient, /, *, out: Any = None) -> tuple[Array, Array | None, Array | None]:
    """As `generic.begin_backward`; two launches, three after a ReLU without a residual."""
    dy, x, weight, bias, (mean, var, _, _), eps, axis, relu, y, _, _ = g
    plan = plan_of(x, axis)
    if plan is None or out is not None or not _fit_gradient(plan, g):
        return generic.begin_backward(g, out=out)
    run = Kernels(plan, x.dtype, gradient=dy.dtype, parameter=_dtype(weight, bias))
    scale = shift = None
    if relu and y is None:
        scale, shift = _wide(plan.C), _wide(plan.C)
        _coefficients(run, g, var, scale, shift)
    partials = _wide(2, plan.splits, plan.C)
    activations = _laid_out_as(x, dy), x, _laid_out_as(x, y) if relu else None
    sizes = *plan.sizes, plan.length, np.uint32(plan.cols), np.int32(relu)
    run("backward_sums", plan.split_grid, *activations, mean, scale, shift, partials, *sizes)
    packed = _wide(message.backward_payload(plan.C))
    dweight, dbias = (None if p is None else cupy.empty_like(p) for p in (weight, bias))
    written, numbers = (packed, dweight, dbias), (plan.C, plan.num_splits)
    run("pack_sums", plan.merge_grid, partials, var, np.float64(eps), *written, *numbers)
    return written


def finish_backward(g: Gradient, summed: Array, /) -> tuple[Array, Array | None]:
    """As `generic.finish_backward`; two launches."""
    dy, x, weight, bias, (mean, var, _, element_weight), _, axis, relu, y, _, _ = g
    plan = plan_of(x, axis)
    if (
        plan is None
        or not isinstance(summed, cupy.ndarray)
        or not _fit_gradient(plan, g)
        or not (isinstance(element_weight, float) or _is_number(element_weight))
    ):
        return generic.finish_backward(g, summed)
    run = Kernels(plan, x.dtype, gradient=dy.dtype, parameter=_dtype(weight, bias))
    scale, shift, slope, intercept = (_wide(plan.C) for _ in range(4))
    share = (None, element_weight) if isinstance(element_weight, float) else (element_weight, 0.0)
    _coefficients(run, g, var, scale, shift, summed, *share, slope, intercept)
    dx = cupy.empty_like(x)
    dresidual = None if y is None else cupy.empty_like(x, dtype=dy.dtype)
    inputs = _laid_out_as(x, dy), x, _laid_out_as(x, y) if relu else None
    columns = mean, scale, shift, slope, intercept
    sizes = plan.size, plan.C, plan.S, np.int32(relu)
    run("input_gradient", plan.element_grid, *inputs, *columns, dx, dresidual, *sizes)
    return dx, dresidual


def normalize(i: Input, batch: BatchStatistics, /) -> Array:
    """As `generic.normalize`; two launches. The output is rounded once, to the dtype of `x`."""
    plan = plan_of(i.x, i.axis)
    if plan is None or not _fit_input(plan, i) or not _fit(plan, batch[:2]):
        return generic.normalize(i, batch)
    run = Kernels(plan, i.x.dtype, parameter=_dtype(i.weight, i.bias))
    scale, shift = _wide(plan.C), _wide(plan.C)
    _coefficients(run, i, batch.var, scale, shift)
    return _normalized(run, i, batch.mean, scale, shift)


move = generic.move


def _coefficients(
    run: Kernels,
    layer: Input | Gradient,
    var: Array,
    scale: Array,
    shift: Array,
    summed: Array | None = None,
    element_weight: Array | None = None,
    factor: float = 0.0,
    *slopes: Array,
) -> None:
    inputs = var, layer.weight, layer.bias, np.float64(layer.eps)
    sums = summed, element_weight, np.float64(factor)
    outputs = scale, shift, *(slopes or (None, None))
    run("coefficients", run.plan.channel_grid, *inputs, *sums, *outputs, run.plan.C)


def _normalized(run: Kernels, i: Input, mean: Array, scale: Array, shift: Array) -> Array:
    plan, y = run.plan, cupy.empty_like(i.x)
    arguments = i.x, _laid_out_as(i.x, i.residual), mean, scale, shift, y
    sizes = plan.size, plan.C, plan.S, np.int32(i.relu)
    run("normalize", plan.element_grid, *arguments, *sizes)
    return y


def _moved(
    running: Running | None, count: float
) -> tuple[tuple[Array | None, Array | None, Array | None], tuple[float, float]]:
    """What `unpack` moves; the momentum, and the factor of the variance, 0 for the global one."""
    if running is None:
        return (None, None, None), (0.0, 0.0)
    is_global = running.convention == "unbiased_global"
    factor = 0.0 if is_global else generic.variance_factor(0.0, count, running.convention)
    return (running.mean, running.var, running.num_batches), (running.momentum or 0.0, factor)


def _fit_running(plan: Plan, running: Running) -> bool:
    """Whether `unpack` can move the statistics.

    A cumulative average would read the counter, which another block may have written.
    """
    counter = running.num_batches
    return (
        (running.momentum is not None or counter is None)
        and all(_is_parameter(plan, v) for v in (running.mean, running.var))
        and running.mean.dtype == running.var.dtype
        and (counter is None or (isinstance(counter, cupy.ndarray) and counter.dtype == np.int64))
    )


def _fit_input(plan: Plan, i: Input) -> bool:
    """Whether the kernels can normalize the input."""
    return (
        i.mask is None
        and (i.residual is None or i.residual.dtype == i.x.dtype)
        and _fit(plan, (), i.weight, i.bias)
    )


def _fit_gradient(plan: Plan, g: Gradient) -> bool:
    return (
        g.mask is None
        and g.dy.dtype.name in TYPES
        and (g.y is None or g.y.dtype == g.x.dtype)
        and _fit(plan, g.batch[:2], g.weight, g.bias)
    )


def _fit(plan: Plan, wide: tuple[Array, ...], *parameters: Array | None) -> bool:
    """Whether the kernels can take these per-channel arrays."""
    present = [p for p in parameters if p is not None]
    return (
        all(_is_parameter(plan, v) and v.dtype == np.float64 for v in wide)
        and all(_is_parameter(plan, p) for p in present)
        and len({p.dtype for p in present}) < 2
    )


def _is_parameter(plan: Plan, v: Any) -> bool:
    return (
        isinstance(v, cupy.ndarray)
        and v.size == plan.C
        and v.dtype.name in TYPES
        and v.flags.c_contiguous
    )


def _is_number(v: Any) -> bool:
    return isinstance(v, cupy.ndarray) and v.shape == () and v.dtype == np.float64


def _dtype(*arrays: Array | None) -> str:
    """The dtype's name of those that are there."""
    return next((str(a.dtype) for a in arrays if a is not None), "float32")


def _wide(*shape: int) -> Array:
    """Uninitialised float64 array."""
    return cupy.empty(shape, dtype=np.float64)


def _laid_out_as(x: Array, other: Array | None) -> Array | None:
    """`other` in the memory order of `x`; a copy if need be."""
    if other is None:
        return None
    same = all(
        n == 1 or a // x.itemsize == b // other.itemsize
        for n, a, b in zip(x.shape, x.strides, other.strides, strict=True)
    )
    if same:
        return other
    out = cupy.empty_like(x, dtype=other.dtype)
    out[...] = other
    return out
