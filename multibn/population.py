"""What is kept of the batches: running statistics, and the statistics of a whole population.

One rule covers every framework: `running += momentum * (batch - running)`. torch's momentum is
1 - Chainer's decay; torch's `momentum=None` and Chainer's fine-tuning are momentum = 1/n at the
n-th batch, the cumulative average.
"""

from array_api_compat import to_device

from multibn._arrays import array_namespace, device
from multibn._typing import Array, RunningVar, check_choice
from multibn.communicators import Communicator, SingleProcess
from multibn.communicators._host import is_on_host
from multibn.kernels.generic import as_wide
from multibn.statistics import (
    BatchStatistics,
    Moments,
    aggregate,
    at_least_one,
    empty_moments,
    merge_moments,
)


def running_variance(
    batch: BatchStatistics, /, *, local_count: int, convention: RunningVar = "unbiased_global"
) -> Array:
    """The variance that a running average keeps, shape `(C,)`, float64.

    Parameters
    ----------
    batch
        Statistics of the whole batch; their variance is biased.
    local_count
        This rank's elements per channel; read by `"unbiased_local"` only.
    convention
        `"unbiased_global"` multiplies by N/(N-1) with N counted over all ranks (torch);
        `"unbiased_local"` by m/max(m-1, 1) with m counted on this rank (ChainerMN), so that ranks
        with different m keep different values; `"biased"` keeps the variance as it is (detectron2,
        SlowFast, flax).

    Raises
    ------
    ValueError
        If `convention` is none of the three.
    """
    check_choice("running_var", convention, RunningVar)
    if convention == "biased":
        return batch.var
    if convention == "unbiased_local":
        return batch.var * (local_count / max(local_count - 1, 1))
    return batch.var * (batch.count / at_least_one(batch.count - 1))


def update_running(
    running_mean: Array,
    running_var: Array,
    batch: BatchStatistics,
    /,
    *,
    momentum: float | Array,
    local_count: int,
    convention: RunningVar = "unbiased_global",
) -> tuple[Array, Array]:
    """New running mean and variance, in the dtype and on the device of the old ones. Pure.

    `momentum` is a number, or an array of shape `()` so that a count on a GPU need not be read.
    Nothing changes if all ranks were empty. The convention of the variance is `running_variance`'s.
    """
    if is_on_host(batch.count):  # a number is faster than an array of one
        momentum = momentum if bool(batch.count > 0) else 0.0
    else:
        xp = array_namespace(batch.count)
        momentum = momentum * xp.astype(batch.count > 0, batch.count.dtype)
    var = running_variance(batch, local_count=local_count, convention=convention)
    return _step(running_mean, batch.mean, momentum), _step(running_var, var, momentum)


class PopulationEstimator:
    """Exact mean and variance of all data it is shown, batches of unequal sizes included.

    Parameters
    ----------
    like
        Any per-channel array, for its shape and device: a rank that is shown nothing still takes
        part in `compute`.
    """

    def __init__(self, like: Array, /) -> None:
        self._moments = empty_moments(like)

    def update(self, moments: Moments, /) -> None:
        """Add one batch. Not collective."""
        self._moments = merge_moments(self._moments, moments)

    def compute(self, communicator: Communicator | None = None, /) -> BatchStatistics:
        """Statistics of everything that all ranks were shown; the variance is biased.

        Collective over `communicator` (default: this process alone); one allreduce of 2C+2 numbers.
        """
        return aggregate(self._moments, SingleProcess() if communicator is None else communicator)


def _step(running: Array, new: Array, momentum: float | Array) -> Array:
    xp = array_namespace(running)
    # Not running + momentum * (new - running), which keeps rounding errors of the old value even
    # where momentum is 1.
    wide = (1 - momentum) * as_wide(running) + momentum * new
    return to_device(xp.astype(wide, running.dtype, copy=False), device(running))
