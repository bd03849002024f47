"""Running statistics, and the statistics of a whole population.

One rule covers every framework: `running += momentum * (batch - running)`. torch's `momentum` is
1 minus Chainer's `decay`. torch's `momentum=None` and Chainer's fine-tuning are the cumulative
average: momentum = 1/n at the n-th batch.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from multibn import kernels, wire
from multibn._arrays import array_namespace, device
from multibn._typing import Array, RunningVar
from multibn.communicators import Communicator, SingleProcess
from multibn.communicators.channel import at
from multibn.communicators.diagnostics import describe_ranks
from multibn.engine import masks
from multibn.engine.statistics import BatchStatistics, Moments, allreduce_statistics
from multibn.kernels import NormArgs, Running, steps

_NAMES = re.compile(r"(^|_)(running|moving|avg|ema|population)_(mean|var|variance|std)$")


def is_running_statistic(name: str, /) -> bool:
    """Return whether `name` is the name of a running statistic in any library.

    True for running_var, escnn's regular_running_var, Chainer's avg_mean, Keras's moving_variance.
    """
    return _NAMES.search(name) is not None


def running_variance(
    batch: BatchStatistics,
    /,
    *,
    local_count: float | Array,
    convention: RunningVar = "unbiased_global",
) -> Array:
    """Return the variance that goes into a running average, shape `(C,)`, float64.

    Parameters
    ----------
    batch
        Statistics of the whole batch, with the biased variance.
    local_count
        This rank's elements per channel; read by `"unbiased_local"` only.
    convention
        `"unbiased_global"`: times N/(N-1), with N counted over all ranks (torch).
        `"unbiased_local"`: times m/max(m-1, 1), with m counted on this rank (ChainerMN), so that
        ranks may get different values; if m is 0, as `"unbiased_global"`. `"biased"`: unchanged
        (detectron2, SlowFast, flax).

    Raises
    ------
    ValueError
        If `convention` is none of the three.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn import SingleProcess
    >>> from multibn.engine import aggregate, local_moments, running_variance
    >>> batch = aggregate(local_moments(np.asarray([[1.0], [3.0]])), SingleProcess())
    >>> print(running_variance(batch, local_count=2.0))
    [2.]
    >>> print(running_variance(batch, local_count=2.0, convention="biased"))
    [1.]
    """
    return batch.var * steps.variance_factor(batch.count, local_count, convention)


def pool_running(
    mean: Array, var: Array, average: Callable[[Array], Array], /, *, between: Any = 1.0
) -> tuple[Array, Array]:
    """Return the mean and variance, float64, of the data of several models together.

    `average` averages an array over the models. `between` weights the between-model
    variance, which is that of the means: 1 for batch norms, 0 for instance norms.
    """
    pooled = average(mean)
    return pooled, average(var + between * (mean - pooled) ** 2)


def merge(a: Any, b: Any, /) -> Any:
    """Merge the (mean, biased variance, count) of two sets of numbers (Chan et al., 1979)."""
    count = a[2] + b[2]
    share, shift = b[2] / steps.at_least_one(count), b[0] - a[0]
    var = (1 - share) * a[1] + share * (b[1] + (1 - share) * shift * shift)
    return a[0] + share * shift, var, count


def merge_over_ranks(old: Any, new: Any, communicator: Communicator, place: str, /) -> Any:
    """Merge `old`, which is equal on all ranks, with each rank's `new`; both as in `merge`.

    Collective: one allreduce of 2C+1 float64 numbers, preceded by one of C+1 if the count of `old`
    is 0. Raises FloatingPointError on all ranks if a rank has NaN, infinity or values that
    overflow, and RuntimeError if the ranks are not all in the same `place`.
    """
    mean, var, count = new
    xp, centre = array_namespace(mean), old[0]

    def mean_and_count(*arrays: Array) -> Any:  # `arrays` ends with the count
        numbers = wire.concat(arrays)
        if not xp.all(xp.abs(numbers) < wire.LARGEST):
            numbers = xp.full_like(numbers, wire.rank_bit(communicator.rank))
        sums = at(communicator, place).allreduce(numbers)
        if not abs(sums[-1]) < wire.LARGEST_SUM:
            where = describe_ranks([float(sums[-1])], communicator.size)
            raise FloatingPointError(
                f"`x` must be finite: got NaN, infinity or values that overflow on {where}. Mask "
                "these elements. All ranks discard their statistics since the last update."
            )
        return sums[:-1] / steps.at_least_one(sums[-1]), sums[-1]

    if not float(old[2]):  # moments about a distant centre would lose digits
        centre = xp.reshape(mean_and_count(count * mean, count)[0], mean.shape)
    d = mean - centre
    moments, total_count = mean_and_count(count * d, count * (var + d * d), count)
    first, second = xp.reshape(moments, (2, *mean.shape))
    return merge(old, (centre + first, xp.clip(second - first * first, 0.0, None), total_count))


class PopulationEstimator:
    """Exact mean and variance of all batches passed to `update`; batch sizes may differ.

    Parameters
    ----------
    like
        Any per-channel array. The estimator takes its shape and device, so that a rank without
        batches can call `compute`.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.engine import PopulationEstimator, local_moments
    >>> estimator = PopulationEstimator(np.zeros(1))
    >>> for batch in ([[1.0], [3.0]], [[5.0], [7.0], [9.0]]):
    ...     estimator.update(local_moments(np.asarray(batch)))
    >>> population = estimator.compute()
    >>> print(population.mean, population.var)
    [5.] [8.]
    """

    def __init__(self, like: Array, /) -> None:
        wide = steps.as_wide(like)
        xp, self.shape = array_namespace(wide), tuple(wide.shape)
        length = wire.forward_payload(math.prod(self.shape))  # the sum of the batches' payloads
        self._sums = xp.zeros(length, dtype=wide.dtype, device=device(wide))

    def update(self, moments: Moments, /) -> None:
        """Add one batch. Not collective."""
        mean, meansqr, count, _ = moments
        self.add(steps.pack(mean, meansqr, count, count))

    def add(self, sums: Array, /) -> None:
        """Add one batch, given the result of `sums_of`. Not collective."""
        self._sums += sums

    def sums_of(self, x: Array, /, *, axis: tuple[int, ...], mask: Array | None = None) -> Array:
        """Return the sums of a batch `x` for `add`: over `axis`, where `mask` is True."""
        args = NormArgs(x, None, None, 0.0, axis, mask=mask)
        _, count = masks.weigh(args, "element")
        return kernels.select(x).begin_forward(args, count, count)

    def compute(self, communicator: Communicator | None = None, /) -> BatchStatistics:
        """Return the statistics of all batches of all ranks; the variance is biased.

        Collective over `communicator` (default: this process alone); one allreduce of 2C+2 numbers.
        """
        xp, sums = array_namespace(self._sums), self._sums
        communicator = SingleProcess() if communicator is None else communicator
        mark = xp.full_like(sums, wire.rank_bit(communicator.rank))
        sums = xp.where(xp.abs(sums) < wire.LARGEST, sums, mark)
        return allreduce_statistics(sums, self.shape, sums[-1], sums[-1], communicator)


class StepAccumulator:
    """The statistics of all batches of one step, as if they were concatenated.

    A batch is weighted by its elements over all ranks. Its statistics are equal on all ranks, so
    merging needs no communication. If a batch is skipped, the total count is 0. A copy or an
    unpickled accumulator is None: a copied layer takes no part in the original's step. `like` is
    any per-channel array.
    """

    running: Any = None  # Chainer: the averages of the last call, updated after the step
    momentum: float | None = None  # torch: the last call's momentum, if it is not the layer's

    def __init__(self, like: Array, /) -> None:
        wide = steps.as_wide(like)
        xp = array_namespace(wide)
        self._mean, self._var = xp.zeros_like(wide), xp.zeros_like(wide)
        self._count, self._local_count = xp.sum(self._mean), xp.sum(self._mean)

    def add(self, batch: BatchStatistics, /, *, local_count: float | Array) -> None:
        """Add a batch, of which this rank has `local_count` elements per channel.

        Not collective. Updates the arrays in place: a compiled graph keeps their addresses.
        """
        xp, count = array_namespace(self._mean), batch.count
        mean, var = (xp.reshape(v, self._mean.shape) for v in batch[:2])
        # An empty or recomputed batch has count 0, and must change nothing. A skipped batch has
        # count 0 and a mean of NaN, which stays: `compute` then returns count 0, and the step
        # updates nothing, just as a gradient scaler skips the step.
        mean = xp.where(count > 0, mean, self._mean + 0 * mean)
        var = xp.where(count > 0, var, 0 * count)
        pooled = merge((self._mean, self._var, self._count), (mean, var, count))
        self._mean[...], self._var[...] = pooled[:2]
        self._count += count
        self._local_count += local_count * (count > 0)

    def compute(self) -> tuple[BatchStatistics, Array]:
        """Return the statistics of all batches together, and this rank's elements per channel."""
        xp = array_namespace(self._mean)
        count = xp.where(xp.isnan(xp.sum(self._mean)), 0 * self._count, self._count)
        batch = BatchStatistics(self._mean, self._var, count, 1.0 / steps.at_least_one(count))
        return batch, self._local_count

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def update_running(
    running: Running | StepAccumulator | None, batch: BatchStatistics, local_count: Array
) -> None:
    """Update running statistics by a batch, or add the batch to a StepAccumulator."""
    if isinstance(running, StepAccumulator):
        running.add(batch, local_count=local_count)
    elif running is not None:
        steps.update_running(running, *batch[:3], local_count)
