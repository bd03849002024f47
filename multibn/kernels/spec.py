"""The arguments and results of the verbs, the same in all kernels files."""

import math
from operator import attrgetter
from typing import Any, NamedTuple

from multibn import wire
from multibn._arrays import array_namespace
from multibn._typing import Array, RunningVar

# The states of a message, from `finish_forward`. On a GPU, reading the sum would wait, so the state
# is `OK`, unless this rank has at most one value per channel. `CANCELLED`: a variance is so small
# compared with the square of the mean that it has lost its digits.
OK, NOT_FINITE, ONE_VALUE, CANCELLED = 0, 2, 3, 4
# A variance is `CANCELLED` if `(var + eps) / mean**2` is less than this, for float64 inputs and for
# others. Otherwise, outputs are correct to 12 digits, or to float32's precision for other dtypes:
# sums have a relative rounding error of 2**-52.
MIN_RELATIVE_VARIANCE = 2.0**-13, 2.0**-27


class BatchStatistics(NamedTuple):
    """Statistics of the whole batch; equal on every rank, except `element_weight`.

    Attributes
    ----------
    mean, var
        Mean and biased variance per channel, shape `(C,)`, float64; the variance is never negative.
    count
        Elements per channel over all ranks, shape `()`, float64; 0 if every rank was empty.
    element_weight
        Derivative of `mean` with respect to one local element, shape `()`, float64.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn import SingleProcess
    >>> from multibn.engine import aggregate, local_moments
    >>> batch = aggregate(local_moments(np.ones((4, 3, 5))), SingleProcess())
    >>> float(batch.count), float(batch.element_weight)
    (20.0, 0.05)
    """

    mean: Array
    var: Array
    count: Array
    element_weight: Array


class PackedStatistics(NamedTuple):
    """A `BatchStatistics` in one array of 2C+2 numbers, in the order of its fields.

    The verbs return and take this form, because allocating one array takes less time than four.
    """

    numbers: Array  # contiguous
    shape: tuple[int, ...]  # of the mean


def pack_statistics(batch: BatchStatistics) -> PackedStatistics:
    """Return the statistics in a new array."""
    return PackedStatistics(wire.concat(batch), tuple(batch.mean.shape))


def unpack(batch: PackedStatistics) -> BatchStatistics:
    """Return the statistics, as views of their numbers."""
    numbers, shape = batch
    mean, var = split_sums(numbers, shape)
    return BatchStatistics(mean, var, numbers[-2], numbers[-1])


def split_sums(numbers: Array, shape: tuple[int, ...], /) -> list[Array]:
    """Return the first and the next C numbers of a payload, as two per-channel arrays."""
    C, xp = math.prod(shape), array_namespace(numbers)
    return [xp.reshape(v, shape) for v in (numbers[:C], numbers[C : 2 * C])]


class Running(NamedTuple):
    """Running statistics, which `finish_forward` updates in place.

    Attributes
    ----------
    mean, var
        As many numbers as there are channels, in any shape and floating-point dtype.
    momentum
        The weight of the batch; None for 1/n at the n-th batch, or 0 without `num_batches`.
    convention
        Which variance goes into `var`, see `multibn.engine.running_variance`.
    num_batches
        A counter of shape `()`; None to count nothing.
    """

    mean: Array
    var: Array
    momentum: float | None
    convention: RunningVar = "unbiased_global"
    num_batches: Array | None = None


class NormArgs(NamedTuple):
    """The input of one layer, with the layer's parameters, options and running statistics.

    Attributes
    ----------
    x
        The activation; may be empty.
    weight, bias
        Shape `(C,)`, or more generally that of the axes that are not reduced, in any floating-point
        dtype; None for ones and zeros.
    eps
        Added to the variance.
    axis
        The axes to reduce.
    relu
        Whether a ReLU comes last.
    mask
        Booleans that broadcast against `x`, the same for all channels, see `multibn.engine.masks`.
        Elements where the mask is False are ignored, whatever they hold, and their output is 0.
    residual
        Added to the normalized input, an array like `x`.
    running
        A `Running` to update in place, unless all ranks are empty. `multibn.engine.plan` also takes
        a `running.StepAccumulator`.
    """

    x: Array
    weight: Array | None
    bias: Array | None
    eps: float
    axis: tuple[int, ...]
    relu: bool = False
    mask: Array | None = None
    residual: Array | None = None
    running: Any = None


# The fields that are not arrays. They follow `bias`: NormArgs(x, weight, bias, *options_of(args)).
OPTIONS = "eps", "axis", "relu"
options_of: Any = attrgetter(*OPTIONS)


class Gradient(NamedTuple):
    """Arguments of the backward pass.

    Attributes
    ----------
    dy
        The gradient of the output. With ReLU, it is treated as 0 where the output was not positive.
    input
        The `NormArgs` of the forward pass; residual and running statistics are not read.
    batch
        The statistics.
    y
        The output, if there was a residual before the ReLU. Without a residual, the sign of the
        output is recomputed from `x`, by exactly the arithmetic of the forward pass.
    needs_dx
        Whether the gradient of `x` is needed.
    """

    dy: Array
    input: NormArgs
    batch: PackedStatistics
    y: Array | None = None
    needs_dx: bool = True
