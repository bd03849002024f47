"""What running mean and variance become of the batches of a pass: `update_bn_stats`' estimators."""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from multibn.communicators import Communicator
from multibn.communicators.conversation import during
from multibn.kernels.generic import as_wide
from multibn.population import PopulationEstimator, running_variance
from multibn.statistics import Moments, aggregate

Estimator: TypeAlias = Literal["population", "mean_of_var"]


class Estimate(NamedTuple):
    """What becomes of running mean and variance, if there was data."""

    mean: Tensor
    var: Tensor
    any_data: Tensor


class Population(PopulationEstimator):
    def estimate(self, communicator: Communicator, /) -> Estimate:
        batch = self.compute(communicator)
        var = running_variance(batch, local_count=0, convention="unbiased_global")
        return Estimate(batch.mean, var, batch.count > 0)


class MeanOfVar:
    def __init__(self, like: Tensor, shared_by: Communicator, /) -> None:
        zeros = torch.zeros_like(as_wide(like))
        self._sums = torch.stack([zeros, zeros])  # of means and of variances
        self._num_batches = zeros.new_zeros(())
        self._shared_by = shared_by

    def update(self, moments: Moments, /) -> None:
        # In the place of a forward pass, which on another rank may be one that is refused.
        batch = aggregate(moments, during(self._shared_by, "forward", moments.mean.dtype))
        var = running_variance(batch, local_count=0, convention="unbiased_global")
        occupied = float(moments.count > 0)
        self._sums += occupied * torch.stack([batch.mean, var])
        self._num_batches += occupied

    def estimate(self, communicator: Communicator, /) -> Estimate:
        packed = communicator.allreduce(torch.cat([self._sums.flatten(), self._num_batches[None]]))
        mean, var = (packed[:-1] / packed[-1].clamp(min=1)).chunk(2)
        return Estimate(mean, var, packed[-1] > 0)
