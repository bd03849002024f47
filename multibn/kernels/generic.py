"""The verbs in the array API standard: the reference, for any library.

A layer's pass is two halves each way, with the message between: `begin_forward` gives the numbers
that the rank sends, `finish_forward` takes their sum; `begin_backward` and `finish_backward` the
same for the gradients. `normalize` is the pass by known statistics. All else here are the steps
between an activation and a message; `generic_passes` has the passes over activations, and says what
arrays these take.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import to_device

from multibn import message
from multibn._arrays import (
    array_namespace,
    device,
    is_abstract,
    is_on_host,
    is_traced,
    to_host,
    values,
)
from multibn._typing import Array, RunningVar, check_choice
from multibn.kernels import generic_passes
from multibn.kernels.generic_passes import arithmetic_dtype as arithmetic_dtype
from multibn.kernels.generic_passes import as_wide as as_wide
from multibn.kernels.generic_passes import at_least_one as at_least_one
from multibn.kernels.generic_passes import backward_sums as backward_sums
from multibn.kernels.generic_passes import input_gradient as input_gradient
from multibn.kernels.generic_passes import local_moments as local_moments
from multibn.kernels.generic_passes import masked as masked
from multibn.kernels.generic_passes import normalize as normalize
from multibn.kernels.generic_passes import num_elements as num_elements
from multibn.kernels.generic_passes import rectified as rectified

# What `finish_forward` says of a message. On a GPU, where reading would wait, the sum is taken to
# be right, but for `ONE_VALUE` where this rank has at most one value per channel.
RIGHT, REFUSED, NOT_FINITE, ONE_VALUE = 0, 1, 2, 3


class Running(NamedTuple):
    """Running statistics, which `finish_forward` moves in place.

    Attributes
    ----------
    mean, var
        As many numbers as there are channels, in any shape and floating-point dtype.
    momentum
        The weight of the batch; None for 1/n at the n-th batch, which needs `num_batches`.
    convention
        Which variance goes into `var`, see `multibn.running_variance`.
    num_batches
        A counter of shape `()`, or None where nothing is to be counted.
    """

    mean: Array
    var: Array
    momentum: float | None
    convention: RunningVar = "unbiased_global"
    num_batches: Array | None = None


# y, mean, var, count over all ranks, element_weight (see `multibn.BatchStatistics`), and the state.
Finished: TypeAlias = tuple[Array, Array, Array, Array, Array, int]


def begin_forward(
    x: Array,
    rank_weight: float | Array,
    count: float | Array,
    /,
    *,
    axis: tuple[int, ...],
    mask: Array | None = None,
    out: Array | None = None,
    passes: Any = None,
) -> Array:
    """This rank's numbers for the forward message: a layer's payload, see `multibn.message`.

    Parameters
    ----------
    x
        The activation; may be empty.
    rank_weight, count
        What this rank counts for, and its elements per channel, those of the mask only if there is
        one; with a mask on a GPU, arrays of shape `()`.
    mask
        Booleans that broadcast against `x`, the same for all channels: elements where the mask is
        False take no part, whatever they hold.
    out
        A float64 vector in host memory (of NumPy, for activations of any library) that gets the
        payload and is returned; or a `message.Message`, which `cuda` fills and returns. All other
        files return a payload in its place.
    passes
        A module whose `local_moments`, `normalize`, `backward_sums` and `input_gradient` take the
        place of this file's, for a file that has no verbs of its own; not read with a mask.
    """
    masked = {} if mask is None else {"mask": mask, "count": count}
    mean, var = _passes(passes, mask).local_moments(x, axis=axis, **masked)
    return pack(mean, var + mean * mean, rank_weight, count, out=out)


def finish_forward(
    summed: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    rank_weight: float | Array,
    count: float | Array,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    residual: Array | None = None,
    relu: bool = False,
    mask: Array | None = None,
    running: Running | None = None,
    passes: Any = None,
) -> Finished:
    """Normalize `x` by the sum of all ranks' payloads, and move the running statistics.

    Returns `y, mean, var, count, element_weight, state`: the activation's output, the statistics
    of the whole batch, and `RIGHT`, or what is wrong with the message. In the latter case the
    running statistics stay as they are, and `y` may be anything.

    Parameters
    ----------
    summed
        The sum, on the device of `x` or in host memory. Not kept: the memory may be the line's.
    x, rank_weight, count, mask
        As in `begin_forward`. The output is 0 where the mask is False.
    weight, bias, eps
        Of the normalization, see `normalize`.
    residual, relu
        Added to the output, an array like `x`; whether ReLU comes last.
    running
        Moved in place, unless all ranks were empty.
    passes
        As in `begin_forward`.
    """
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    mean, var, total, element_weight, state = unpack(_like(summed, x), shape, rank_weight, count)
    options: dict[str, Any] = {"eps": eps, "axis": axis, "residual": residual, "relu": relu}
    y = _passes(passes, mask).normalize(masked(x, mask), mean, var, weight, bias, **options)
    if running is not None and state == RIGHT:
        move(running, mean, var, total, count)
    return masked(y, mask), mean, var, total, element_weight, state


def begin_backward(
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    mask: Array | None = None,
    out: Array | None = None,
    passes: Any = None,
) -> tuple[Array, Array | None, Array | None]:
    """This rank's numbers for the backward message, and the gradients of weight and bias.

    The payload has the sums over `axis` of `dy` and of `dy * xhat`, where
    `xhat = (x - mean) / sqrt(var + eps)`. The gradients are the same numbers in memory of their own
    and in the dtypes of `weight` and `bias`, None where a parameter is.

    Parameters
    ----------
    dy
        Gradient of the output of `finish_forward`, of the shape of `x`.
    x, mean, var, weight, bias, eps, axis, mask
        As in and from the forward pass.
    relu
        Whether the forward pass ended in ReLU: `dy` is then taken for 0 where the output was not
        positive.
    y
        The output, if there was a residual before the ReLU. Without a residual the output's sign is
        computed from `x`, by exactly the arithmetic of the forward pass.
    out, passes
        As in `begin_forward`.
    """
    k, x = _passes(passes, mask), masked(x, mask)
    dy = _before_relu(k, dy, x, mean, var, weight, bias, eps=eps, axis=axis, relu=relu, y=y)
    dy = masked(dy, mask)
    payload = message.concat(k.backward_sums(dy, x, mean, var, eps=eps, axis=axis))
    gradients = parameter_gradients(payload, mean.shape, weight, bias)
    return _written(payload, out), *gradients


def finish_backward(
    summed: Array,
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    element_weight: Array,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    relu: bool = False,
    y: Array | None = None,
    mask: Array | None = None,
    passes: Any = None,
) -> tuple[Array, Array | None]:
    """The gradients of `x` and, if `y` is passed, of the residual before the ReLU.

    Parameters
    ----------
    summed
        The sum of all ranks' payloads, as in `finish_forward`.
    element_weight
        From `finish_forward`.
    dy, x, mean, var, weight, bias, eps, axis, relu, y, mask, passes
        As in `begin_backward`. The gradients are 0 where the mask is False.
    """
    k, x = _passes(passes, mask), masked(x, mask)
    dy = _before_relu(k, dy, x, mean, var, weight, bias, eps=eps, axis=axis, relu=relu, y=y)
    dy = masked(dy, mask)
    sums = split_sums(_like(summed, mean), mean.shape)
    statistics = mean, var, weight, element_weight, *sums
    dx = k.input_gradient(dy, x, *statistics, eps=eps, axis=axis)
    return masked(dx, mask), None if y is None else dy


def pack(
    mean: Array, meansqr: Array, weight: Array, count: Array, /, *, out: Array | None = None
) -> Array:
    """A layer's forward payload, see `multibn.message`: a new vector, or `out`."""
    xp = array_namespace(mean)
    numbers = [
        xp.reshape(v, (1,))
        if hasattr(v, "dtype")
        else xp.full((1,), v, dtype=mean.dtype, device=device(mean))
        for v in (weight, count)
    ]
    return _written(message.concat([weight * mean, weight * meansqr, *numbers]), out)


def unpack(
    summed: Array, shape: tuple[int, ...], rank_weight: Array, count: Array, /
) -> tuple[Array, Array, Array, Array, int]:
    """The statistics in the sum of all ranks' payloads, and the state of the message.

    The results are those of `finish_forward`; per-channel arrays get `shape`.
    """
    xp = array_namespace(summed)
    C = math.prod(shape)
    meansqr = summed[C : 2 * C]
    total_weight, total = (
        xp.reshape(values(summed[2 * C + i]), (-1,))[0]  # the same in all of a batch of vmap
        for i in (message.WEIGHT, message.COUNT)
    )
    divisor = xp.where(total_weight == 0.0, xp.ones_like(total_weight), total_weight)
    mean = summed[:C] / divisor
    return (
        xp.reshape(mean, shape),
        xp.reshape(xp.clip(meansqr / divisor - mean * mean, 0.0, None), shape),
        total,
        rank_weight / (at_least_one(count) * divisor),
        state(summed, count),
    )


def state(summed: Array, count: float | Array, /) -> int:
    """What is wrong with the sum of all ranks' payloads, or `RIGHT`; `count` as in `unpack`."""
    if is_abstract(summed):
        return RIGHT
    xp = array_namespace(summed)
    total = xp.reshape(values(summed[-1]), (-1,))[0]
    if is_on_host(summed) and not is_traced(summed):
        if bool(xp.isnan(total)):
            return REFUSED
        if not bool(xp.all(xp.isfinite(values(xp.sum(summed[:-2]))))):
            return NOT_FINITE
    # Every rank has at most one value if all have one together: only then is the count read. A
    # count of a mask on a GPU is never read.
    return ONE_VALUE if isinstance(count, float) and count <= 1 and bool(total == 1) else RIGHT


def split_sums(summed: Array, shape: tuple[int, ...], /) -> list[Array]:
    """The sums of `dy` and of `dy * xhat` in a backward payload, as per-channel arrays."""
    C, xp = math.prod(shape), array_namespace(summed)
    return [xp.reshape(v, shape) for v in message.split(summed, (C, C))]


def parameter_gradients(
    payload: Array,
    shape: tuple[int, ...],
    weight: Array | None,
    bias: Array | None,
    divisor: float = 1.0,
) -> tuple[Array | None, Array | None]:
    """The gradients of weight and bias in a backward payload, divided by `divisor`."""
    gradients = []
    for v, p in zip(split_sums(payload, shape), (bias, weight), strict=True):
        if p is not None:
            xp = array_namespace(p)
            v = xp.astype(v / divisor, p.dtype, copy=False)
            v = to_device(v, device(p))
        gradients.append(None if p is None else v)
    dbias, dweight = gradients
    return dweight, dbias


def move(running: Running, mean: Array, var: Array, count: Array, local_count: Array, /) -> None:
    """Move running statistics in place by those of a batch, and count the batch.

    Nothing changes if `count`, the elements per channel over all ranks, is 0.
    """
    old_mean, old_var, momentum, convention, num_batches = running
    readable = is_on_host(count) and not (is_traced(count) or is_abstract(count))
    total = float(count) if readable else count
    moves: Any = total > 0
    if num_batches is not None:
        num_batches += moves
        if momentum is None:
            momentum = 1.0 / array_namespace(mean).clip(as_wide(num_batches), 1.0, None)
    if not isinstance(moves, bool):
        moves = as_wide(moves)  # a bool times a number is of torch's default dtype
    moved = move_averages(
        old_mean,
        old_var,
        array_namespace(mean).reshape(mean, old_mean.shape),
        array_namespace(var).reshape(var, old_var.shape),
        (momentum or 0.0 if isinstance(momentum, float | None) else momentum) * moves,
        variance_factor(total, local_count, convention),
    )
    old_mean[...], old_var[...] = moved


def variance_factor(
    count: float | Array, local_count: float | Array, convention: RunningVar, /
) -> float | Array:
    """What the biased variance is multiplied by, see `multibn.running_variance`."""
    if convention != "unbiased_global":
        check_choice("running_var", convention, RunningVar)
        if convention == "biased":
            return 1.0
        count = local_count
    return count / at_least_one(count - 1)


def move_averages(
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    momentum: float | Array,
    factor: float | Array,
    /,
) -> tuple[Array, Array]:
    """New arrays `running + momentum * (new - running)`; the new variance is `factor * var`."""
    return _move(running_mean, mean, momentum), _move(running_var, var * factor, momentum)


def _before_relu(
    k: Any, dy: Array, x: Array, *statistics: Any, relu: bool, y: Array | None, **on: Any
) -> Array:
    """The gradient before a ReLU whose output was `y`, or, if that is None, is computed."""
    if not relu:
        return dy
    return rectified(dy, k.normalize(x, *statistics, **on) if y is None else y)


def _passes(passes: Any, mask: Array | None) -> Any:
    return generic_passes if passes is None or mask is not None else passes


def _like(summed: Array, x: Array) -> Array:
    """A sum in the library of `x`, in memory that is not a line's."""
    return array_namespace(x).asarray(summed.copy()) if type(summed) is np.ndarray else summed


def _written(payload: Array, out: Any) -> Array:
    """The payload, or `out` with the payload in it if that is in host memory."""
    if out is None or isinstance(out, message.Message):
        return payload
    out[:] = to_host(payload)
    return out


def _move(running: Array, new: Array, momentum: float | Array) -> Array:
    xp = array_namespace(running)
    # running + momentum * (new - running) would keep rounding errors of `running` at momentum 1.
    wide = (1 - momentum) * as_wide(running) + momentum * new
    return to_device(xp.astype(wide, running.dtype, copy=False), device(running))
