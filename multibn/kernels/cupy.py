"""The verbs for CuPy arrays, as CUDA kernels: two launches each.

Activations are read as often as must be: forward once for the moments and once for the output,
backward twice for the sums and twice for the gradient. No pass makes a temporary of the size of an
activation. Arithmetic is in float64, in registers only.

The kernels (`_cupy`) take activations that have sizes (N, C, S), see `_layout`. Masks and
everything else go to `generic`. Results do not depend on the order in which blocks run.
"""

from typing import Any

import cupy
import numpy as np

from multibn import message
from multibn._typing import Array
from multibn.kernels import generic
from multibn.kernels.cupy_launch import TYPES, Kernels, Plan, plan_of
from multibn.kernels.generic import Finished, Running


def begin_forward(
    x: Array, weight: float, count: float, /, *, axis: tuple[int, ...], **options: Any
) -> Array:
    """As `generic.begin_forward`; two launches."""
    plan = plan_of(x, axis)
    if plan is None or any(v is not None for v in options.values()):
        return generic.begin_forward(x, weight, count, axis=axis, **options)
    packed = _wide(message.forward_payload(plan.C))
    run = Kernels(plan, x.dtype)
    partials = _wide(2, plan.splits, plan.C)
    run("moments", plan.split_grid, x, partials, *plan.sizes, plan.length, np.uint32(plan.cols))
    numbers = np.float64(weight), np.float64(count), np.float64(plan.N * plan.S)
    run("pack", plan.merge_grid, partials, x, packed, *numbers, plan.C, plan.S, plan.num_splits)
    return packed


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
    """As `generic.finish_forward`; two launches."""
    weight, bias, rank_weight, count = parameters_and_share
    plan = plan_of(x, axis)
    if (
        plan is None
        or mask is not None
        or not isinstance(summed, cupy.ndarray)
        or not _fit(plan, (), weight, bias)
        or (residual is not None and residual.dtype != x.dtype)
    ):
        on: dict[str, Any] = {"residual": residual, "relu": relu, "mask": mask, "running": running}
        return generic.finish_forward(summed, x, *parameters_and_share, eps=eps, axis=axis, **on)
    state = generic.state(summed, count)
    mean, var, total, element_weight = (_wide(*s) for s in (plan.shape, plan.shape, (), ()))
    scale, shift = _wide(plan.C), _wide(plan.C)
    running = running if state == generic.RIGHT else None
    fits = running is not None and _fit_running(plan, running)
    moved, numbers = _moved(running if fits else None, count)
    run = Kernels(plan, x.dtype, parameter=_dtype(weight, bias), running=_dtype(*moved[:2]))
    outputs = mean, var, total, element_weight, scale, shift
    floats = map(np.float64, (rank_weight, max(count, 1.0), eps, *numbers))
    run("unpack", plan.channel_grid, summed, weight, bias, *moved, *outputs, *floats, plan.C)
    if running is not None and not fits:
        move(running, mean, var, total, count)
    y = _normalized(run, x, mean, scale, shift, residual, relu)
    return y, mean, var, total, element_weight, state


def begin_backward(
    dy: Array,
    x: Array,
    /,
    *statistics: Any,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    **options: Any,
) -> tuple[Array, Array | None, Array | None]:
    """As `generic.begin_backward`; two launches, three after a ReLU without a residual."""
    mean, var, weight, bias = statistics
    plan = plan_of(x, axis)
    if (
        plan is None
        or any(v is not None for v in options.values())
        or not _fit(plan, (mean, var), weight, bias)
        or not _fit_gradient(dy, x, y)
    ):
        on: dict[str, Any] = {"relu": relu, "y": y, **options}
        return generic.begin_backward(dy, x, *statistics, eps=eps, axis=axis, **on)
    run = Kernels(plan, x.dtype, gradient=dy.dtype, parameter=_dtype(weight, bias))
    scale = shift = None
    if relu and y is None:
        scale, shift = _wide(plan.C), _wide(plan.C)
        _coefficients(run, var, weight, bias, eps, scale, shift)
    partials = _wide(2, plan.splits, plan.C)
    activations = _laid_out_as(x, dy), x, _laid_out_as(x, y) if relu else None
    sizes = *plan.sizes, plan.length, np.uint32(plan.cols), np.int32(relu)
    run("backward_sums", plan.split_grid, *activations, mean, scale, shift, partials, *sizes)
    packed = _wide(message.backward_payload(plan.C))
    gradients = [None if p is None else cupy.empty_like(p) for p in (weight, bias)]
    numbers = plan.C, plan.num_splits
    run("pack_sums", plan.merge_grid, partials, var, np.float64(eps), packed, *gradients, *numbers)
    dweight, dbias = gradients
    return packed, dweight, dbias


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
    """As `generic.finish_backward`; two launches."""
    mean, var, weight, bias, element_weight = statistics
    plan = plan_of(x, axis)
    if (
        plan is None
        or mask is not None
        or not isinstance(summed, cupy.ndarray)
        or not _fit(plan, (mean, var), weight, bias)
        or not _fit_gradient(dy, x, y)
        or not (isinstance(element_weight, float) or _is_number(element_weight))
    ):
        on: dict[str, Any] = {"relu": relu, "y": y, "mask": mask}
        return generic.finish_backward(summed, dy, x, *statistics, eps=eps, axis=axis, **on)
    run = Kernels(plan, x.dtype, gradient=dy.dtype, parameter=_dtype(weight, bias))
    scale, shift, slope, intercept = (_wide(plan.C) for _ in range(4))
    share = (None, element_weight) if isinstance(element_weight, float) else (element_weight, 0.0)
    sums = summed, *share, slope, intercept
    _coefficients(run, var, weight, bias, eps, scale, shift, *sums)
    dx = cupy.empty_like(x)
    dresidual = None if y is None else cupy.empty_like(x, dtype=dy.dtype)
    inputs = _laid_out_as(x, dy), x, _laid_out_as(x, y) if relu else None
    columns = mean, scale, shift, slope, intercept
    sizes = plan.size, plan.C, plan.S, np.int32(relu)
    run("input_gradient", plan.element_grid, *inputs, *columns, dx, dresidual, *sizes)
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
    """As `generic.normalize`; two launches. The output is rounded once, to the dtype of `x`."""
    mean, var, weight, bias = statistics
    plan = plan_of(x, axis)
    if (
        plan is None
        or not _fit(plan, (mean, var), weight, bias)
        or (residual is not None and residual.dtype != x.dtype)
    ):
        on: dict[str, Any] = {"residual": residual, "relu": relu}
        return generic.normalize(x, *statistics, eps=eps, axis=axis, **on)
    run = Kernels(plan, x.dtype, parameter=_dtype(weight, bias))
    scale, shift = _wide(plan.C), _wide(plan.C)
    _coefficients(run, var, weight, bias, eps, scale, shift)
    return _normalized(run, x, mean, scale, shift, residual, relu)


move = generic.move


def _coefficients(
    run: Kernels,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    scale: Array,
    shift: Array,
    summed: Array | None = None,
    element_weight: Array | None = None,
    factor: float = 0.0,
    *slopes: Array,
) -> None:
    inputs = var, weight, bias, np.float64(eps), summed, element_weight, np.float64(factor)
    outputs = scale, shift, *(slopes or (None, None))
    run("coefficients", run.plan.channel_grid, *inputs, *outputs, run.plan.C)


def _normalized(
    run: Kernels,
    x: Array,
    mean: Array,
    scale: Array,
    shift: Array,
    residual: Array | None,
    relu: bool,
) -> Array:
    plan = run.plan
    y = cupy.empty_like(x)
    arguments = x, _laid_out_as(x, residual), mean, scale, shift, y
    sizes = plan.size, plan.C, plan.S, np.int32(relu)
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


def _fit_gradient(dy: Array, x: Array, y: Array | None) -> bool:
    return dy.dtype.name in TYPES and (y is None or y.dtype == x.dtype)


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
