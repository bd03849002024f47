"""Batch normalization as a function of arrays, which JAX traces and differentiates.

The per-channel arithmetic before and after the psum is that of `multibn.kernels.steps`. The passes
over an activation are written for XLA to fuse: the sums and the output read the same input minus a
rounded mean, and no gradient flows through the rounding.
"""

import math
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from multibn import wire
from multibn._typing import Array, RunningVar, Weighting, check_choice, check_eps, check_number
from multibn.communicators import SingleProcess
from multibn.engine import masks
from multibn.engine.running import running_variance
from multibn.engine.statistics import OneValueError, not_floating, reduced_axes
from multibn.flax_backend.mesh_axis import AxisName, Groups, MeshAxis, spread
from multibn.kernels import BatchStatistics, NormArgs, reference, steps
from multibn.kernels.spec import NOT_FINITE, OK

_NO_ELEMENT = -1  # the state of a batch whose elements are all masked


class Options(NamedTuple):
    """The options of a layer, under flax's names where flax has them."""

    axis: int | tuple[int, ...] = -1
    epsilon: float = 1e-5
    axis_name: AxisName = None
    axis_index_groups: Groups = None
    weighting: Weighting = "element"
    sum_dtype: Any = "float64"
    momentum: float = 0.99
    running_var: RunningVar = "biased"

    @classmethod
    def from_layer(cls, layer: Any) -> "Options":
        """The options of a layer; raises TypeError or ValueError for a wrong value."""
        found = cls(*(getattr(layer, name) for name in cls._fields))
        check_choice("weighting", found.weighting, Weighting)
        check_choice("running_var", found.running_var, RunningVar)
        check_eps(found.epsilon, "epsilon")
        check_number("momentum", found.momentum, "[0, 1]")
        given = {name: (getattr(found, name), *rule) for name, rule in _RULES.items()}
        return found._replace(**{name: converted(name, *each) for name, each in given.items()})

    def channel_axes(self, ndim: int) -> tuple[int, ...]:
        """The channel axes of an input with `ndim` axes."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        found = tuple(sorted({k + ndim if k < 0 else k for k in axes}))
        if not (found and 0 <= found[0] <= found[-1] < ndim and len(found) < ndim):
            raise ValueError(
                "`axis` must name one or more axes of the input, and at least one other axis must "
                f"remain to reduce over: got {self.axis} for {ndim} axes."
            )
        return found


class NormResult(NamedTuple):
    """The result for one input: the output, running mean and variance, and batch statistics."""

    y: Array
    running: Any
    statistics: Any = None  # a `BatchStatistics`; None if the running statistics were used
    state: Array | int = OK


def sync_batch_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-5,
    axis_name: AxisName = None,
    axis_index_groups: Groups = None,
    weighting: Weighting = "element",
    sum_dtype: Any = jnp.float64,
    mask: Array | None = None,
    lengths: Array | None = None,
) -> tuple[Array, BatchStatistics]:
    """Normalize `x` by the statistics of the batch that all devices hold together.

    See `BatchNorm` for which devices share statistics and how JAX's transformations behave.

    Parameters
    ----------
    x
        Shape `(N, *spatial, C)`, or with the channels on `axis`; floating-point.
    scale, bias
        Shape `(C,)`, or None for 1 and 0.
    axis, epsilon, axis_name, axis_index_groups, weighting, sum_dtype, mask, lengths
        As `BatchNorm`.

    Returns
    -------
    y
        Shape and dtype of `x`; 0 where elements do not count.
    batch
        Mean, biased variance and count of the whole batch, without a gradient; float64 whatever
        jax_enable_x64 says.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `BatchNorm`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from multibn.flax import sync_batch_norm
    >>> y, batch = sync_batch_norm(jnp.asarray([[1.0], [3.0]]))
    >>> print(y[:, 0].round(4), batch.var)
    [-1.  1.] [1.]
    """
    given = Options(axis, epsilon, axis_name, axis_index_groups, weighting, sum_dtype)
    batch = run(floating(x), scale, bias, None, mask, lengths, Options.from_layer(given))
    return batch.y, batch.statistics


def run(
    x: Any, scale: Any, bias: Any, running: Any, mask: Any, lengths: Any, options: Options,
    *, use_running: bool = False,
) -> NormResult:  # fmt: skip
    """Normalize an input by its batch, or by `running` mean and variance if `use_running`.

    Outside of a trace, raises if no element counts, or if the statistics are not finite (float16
    excepted).
    """
    given = {"scale": scale, "bias": bias, "mask": mask, "lengths": lengths}
    with jax.enable_x64(True):
        arrays = [v if v is None else converted(name, v) for name, v in given.items()]
        batch = _run((x, running, *arrays), options, use_running)
    try:
        state = int(batch.state)
    except jax.errors.ConcretizationTypeError:  # traced: no value yet
        return batch
    if state == _NO_ELEMENT:
        raise ValueError(
            f"`mask` or `lengths` excludes every element of an input of shape {x.shape}."
        )
    if state == NOT_FINITE and x.dtype != jnp.float16:  # for float16, a scaler skips the step
        raise FloatingPointError(
            "the batch statistics are not finite: the input contains NaN, infinity or values that "
            "overflow. Check the preceding layers."
        )
    return batch


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _run(arrays: Any, options: Options, use_running: bool) -> NormResult:
    x, running, scale, bias, mask, lengths = arrays
    args = _args(x, (scale, bias, *(running or ())), mask, lengths, options)
    if use_running:
        one = jnp.ones((), jnp.float64)
        mean, var = map(steps.as_wide, running)
        known = reference.output_coefficients(args, BatchStatistics(mean, var, one, one))
        return NormResult(reference.finish(args, known), running)
    name, groups = options.axis_name, options.axis_index_groups
    communicator: Any = SingleProcess() if name is None else MeshAxis(name, groups)
    weight, count = _weigh(args, options.weighting, communicator)
    axis, dtype = args.axis, reference.arithmetic_dtype(jnp, x.dtype)
    n, is_float64 = steps.at_least_one(count), dtype == jnp.float64
    x = reference.masked(x.astype(dtype), args.mask)
    # float64, rounded by `astype`: XLA cannot contract this quotient and the subtraction below into
    # one FMA.
    centre = _computed_once(lax.stop_gradient(jnp.sum(x, axis=axis) / n).astype(dtype))
    # Traced code cannot branch on cancellation, so float64 devices always subtract a common mean.
    if is_float64:
        sent = lax.stop_gradient(wire.concat([centre * weight, jnp.reshape(weight, (1,))]))
        total = communicator.allreduce(sent)
        centre = jnp.reshape(total[:-1] / jnp.where(total[-1] == 0, 1.0, total[-1]), centre.shape)
    d = reference.masked(x - reference.per_channel(centre, x, axis), args.mask)
    sum_dtype = jnp.promote_types(options.sum_dtype, dtype).name
    first, second = (v / n for v in _sums(d, axis, sum_dtype))
    # With `is_float64`, the mean in the message is relative to the common centre.
    local_centre = jnp.zeros_like(first) if is_float64 else steps.as_wide(centre)
    mean = local_centre + first
    meansqr = second - first * first + mean * mean
    payload = steps.pack(mean, meansqr, weight, count, wire.rank_bit(communicator.rank))
    summed = communicator.allreduce(payload)
    differentiable, _ = steps.statistics_of(args, spread(summed, x, name), weight, count)
    scales = 1.0 / jnp.sqrt(differentiable.var + args.eps)
    scales = scales if scale is None else scales * steps.as_wide(scale)
    shifts = (local_centre - differentiable.mean) * scales
    shifts = shifts if bias is None else shifts + steps.as_wide(bias)
    rows = (_computed_once(v.astype(dtype)) for v in (scales, shifts))
    scales, shifts = (reference.per_channel(v, x, axis) for v in rows)
    y = reference.masked((d * scales + shifts).astype(args.x.dtype), args.mask)
    batch, _ = steps.statistics_of(args, lax.stop_gradient(summed), weight, count)
    if is_float64:
        batch = batch._replace(mean=batch.mean + centre)
    if running is not None:
        var = running_variance(batch, local_count=count, convention=options.running_var)
        share = (1 - options.momentum) * steps.as_wide(batch.count > 0)
        running = tuple(map(steps.moved, running, (batch.mean, var), (share, share)))
    lost = jnp.any(jnp.isnan(batch.mean))
    state = jnp.where(lost, NOT_FINITE, jnp.where(batch.count > 0, OK, _NO_ELEMENT))
    return NormResult(y, running, batch, state)


def converted(
    name: str, value: Any, expected: str = "an array", function: Callable[[Any], Any] = jnp.asarray
) -> Any:
    """Return `function(value)`; if it fails, raise a TypeError that names the argument."""
    try:
        return function(value)
    except (KeyError, TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be {expected}: got {value!r}.") from error


def _axes(axis: Any) -> int | tuple[int, ...]:
    return tuple(map(index, axis)) if isinstance(axis, list | tuple) else index(axis)


def _groups(groups: Groups) -> Groups:
    return None if groups is None else tuple(tuple(map(index, group)) for group in groups)


_SUM_DTYPES = {jnp.dtype(name): name for name in ("float32", "float64")}
# What an option must be, and how it is kept: jax.jit hashes the options, and flax takes lists.
_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "axis": ("an int or a tuple of ints", _axes),
    "axis_name": ("hashable", lambda v: {tuple(v) if isinstance(v, list) else v}.pop()),
    "axis_index_groups": ("lists of ints, or None", _groups),
    "sum_dtype": ("float32 or float64", lambda v: _SUM_DTYPES[jnp.dtype(v)]),
}


def floating(x: Any) -> Array:
    """An input as an array; raises TypeError unless it is floating-point."""
    x = converted("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise not_floating(x)
    return x


def _args(x: Array, arrays: Any, mask: Any, lengths: Any, options: Options) -> NormArgs:
    """The engine's arguments; raises TypeError or ValueError for those that do not fit."""
    channel_axes = options.channel_axes(x.ndim)
    channel_shape = tuple(x.shape[k] for k in channel_axes)
    axis = reduced_axes(x.ndim, channel_axes)
    if wrong := [v.shape for v in arrays if v is not None and v.shape != channel_shape]:
        raise ValueError(
            f"`scale`, `bias` and running statistics must have shape {channel_shape}, that of axis "
            f"{options.axis} of an input of shape {x.shape}: got {wrong[0]}. Check `axis`, or "
            f"construct the layer of flax.nnx with num_features={math.prod(channel_shape)}."
        )
    if lengths is not None and len(axis) < 2:
        raise ValueError(
            "`lengths` needs an input with axes of N samples and of L elements besides the "
            f"channels' axis {options.axis}: got shape {x.shape}."
        )
    if mask is not None:
        form = tuple(1 if k in channel_axes else n for k, n in enumerate(x.shape))
        if mask.ndim != x.ndim or any(mask.shape[k] != 1 for k in channel_axes):
            cure = ""
            if mask.ndim == x.ndim:
                one = ", ".join(":1" if k in channel_axes else ":" for k in range(x.ndim))
                cure = f" Take the mask of one channel: mask[{one}]."
            elif mask.shape == tuple(x.shape[k] for k in axis):
                cure = f" Add the axis of the channels: jnp.expand_dims(mask, {channel_axes})."
            raise ValueError(
                f"`mask` must have shape {form}, with 1 for the channels, or one that broadcasts "
                f"to it: got {mask.shape} for an input of shape {x.shape}.{cure}"
            )
        mask = jnp.squeeze(mask, channel_axes)
    mask = masks.as_mask(x, mask, lengths, axis=axis)
    return NormArgs(x, arrays[0], arrays[1], options.epsilon, axis, mask=mask)


def _weigh(args: NormArgs, weighting: Weighting, communicator: Any) -> tuple[Array, Array]:
    """This device's weight, and its elements per channel.

    Raises if its shard is empty, or if all devices together have one value per channel.
    """
    weight, count = masks.weigh(args, weighting)
    if args.mask is None and not count:
        raise ValueError(
            f"`x` must have elements: got shape {args.x.shape}. If the batch has fewer samples "
            "than there are devices, pad it and pass a `mask`."
        )
    if args.mask is None and count * communicator.size == 1:
        raise OneValueError(
            "normalizing by the statistics of a batch needs more than 1 value per channel: `x` has "
            f"1, of shape {args.x.shape}. Use a larger batch; a layer can use its running "
            "statistics instead (`use_running_average=True`)."
        )
    return jnp.asarray(weight, jnp.float64), jnp.asarray(count, jnp.float64)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _sums(d: Array, axis: tuple[int, ...], dtype: str) -> tuple[Array, ...]:
    """The sums of `d` and of `d * d`, made in `dtype`; tangents are summed in the dtype of `d`."""
    return tuple(jnp.sum(v, axis=axis, dtype=dtype).astype(jnp.float64) for v in (d, d * d))


@_sums.defjvp
def _sums_jvp(axis: Any, dtype: str, primals: Any, tangents: Any) -> Any:
    (d,), (t,) = primals, tangents
    with jax.enable_x64(True):  # JAX may call this after the context around `_run` has exited
        found = (_computed_once(jnp.sum(v, axis=axis)) for v in (t, d * t))
        first, second = (v.astype(jnp.float64) for v in found)
        return _sums(d, axis, dtype), (first, 2 * second)


def _computed_once(v: Array) -> Array:
    """Return a per-channel array or tangent so that XLA computes it before it is broadcast.

    Otherwise XLA for CPU fuses the float64 arithmetic that yields it into the loop over the
    activation, and repeats it for each element. XLA repeats no division; the barrier hides that
    this one divides by 1.
    """
    return v / lax.optimization_barrier(jnp.ones_like(v))
