"""The arguments and results of the verbs, the same in all kernels files."""

from operator import attrgetter
from typing import Any, NamedTuple

from multibn._typing import Array, RunningVar

# The states of a message, from `finish_forward`. On a GPU, where reading would wait, a sum counts
# as right, but for `ONE_VALUE` where this rank has at most one value per channel. `CANCELLED`: a
# variance has lost its digits beside the square of the mean.
OK, NOT_FINITE, ONE_VALUE, CANCELLED = 0, 2, 3, 4
# Below this `(var + eps) / mean**2`, for float64 inputs and for others, a variance is cancelled.
# Above it, the rounding error of sums, 2**-52, leaves 12 digits of the output, or float32's.
MIN_RELATIVE_VARIANCE = 2.0**-13, 2.0**-27


class BatchStatistics(NamedTuple):
    """Statistics of the whole batch; equal on every rank but for `element_weight`.

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
    """A `BatchStatistics` in one array, of 2C+2 numbers in its order.

    One new array takes less time than four, and few take it apart.
    """

    numbers: Array
    shape: tuple[int, ...]  # of the mean


def unpack(batch: BatchStatistics | PackedStatistics) -> BatchStatistics:
    """The statistics; views of the numbers of packed ones."""
    if isinstance(batch, BatchStatistics):
        return batch
    mean, var = batch.numbers[:-2].reshape((2, *batch.shape))
    return BatchStatistics(mean, var, batch.numbers[-2], batch.numbers[-1])


class Running(NamedTuple):
    """Running statistics, which `finish_forward` moves in place.

    Attributes
    ----------
    mean, var
        As many numbers as there are channels, in any shape and floating-point dtype.
    momentum
        The weight of the batch; None for 1/n at the n-th batch, or 0 without `num_batches`.
    convention
        Which variance goes into `var`, see `multibn.engine.running_variance`.
    num_batches
        A counter of shape `()`, or None where nothing is to be counted.
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
        Of the shape of the axes that are not reduced, `(C,)`, in any floating-point dtype; None for
        ones and zeros.
    eps
        Added to the variance.
    axis
        The axes to reduce.
    relu
        Whether a ReLU comes last.
    mask
        Booleans that broadcast against `x`, the same for all channels, see `multibn.engine.masks`.
        Elements where the mask is False take no part, whatever they hold, and the output is 0
        there.
    residual
        Added to the normalized input, an array like `x`.
    running
        A `Running` to be moved in place, unless all ranks are empty. `multibn.engine.plan` takes a
        `running.StepAccumulator` as well.
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


# The fields that are no arrays. They follow `bias`: NormArgs(x, weight, bias, *options_of(args)).
OPTIONS = "eps", "axis", "relu"
options_of: Any = attrgetter(*OPTIONS)


class Gradient(NamedTuple):
    """Arguments of the backward pass.

    Attributes
    ----------
    dy
        The gradient, of the shape of `x`. With ReLU, taken for 0 where the output was not positive.
    input
        From the forward pass; its residual and its running statistics are not read.
    batch
        The statistics, a `BatchStatistics` or a `PackedStatistics`.
    y
        The output, if there was a residual before the ReLU. Without a residual the output's sign is
        computed from `x`, by exactly the arithmetic of the forward pass.
    needs_dx
        Whether the gradient of `x` is asked for.
    """

    dy: Array
    input: NormArgs
    batch: Any  # statistics
    y: Array | None = None
    needs_dx: bool = True


def unpacked(g: Gradient) -> Gradient:
    """The gradient with its statistics taken apart."""
    return g._replace(batch=unpack(g.batch))
