"""The behaviour of SlowFast's SubBatchNorm3d, which cannot be installed, written from its formulas.

Names of files and lines are SlowFast's, at commit 287ec007.
"""

from typing import Any

import torch
from torch import nn


class SubBatchNorm(nn.Module):
    """slowfast/models/batchnorm_helper.py:40, for any number of dimensions.

    A batch norm over the contiguous batch viewed as (N / splits, splits * C, ...), and running
    statistics that are averaged over the splits. Here, `num_batches_tracked` is copied, too.
    """

    def __init__(
        self,
        cls: Any,
        num_splits: int,
        num_features: int,
        affine: bool = True,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_splits = num_splits
        self.weight = nn.Parameter(torch.ones(num_features, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, dtype=dtype)) if affine else None
        options |= {"affine": False, "dtype": dtype}
        self.bn = cls(num_features, **options)
        self.split_bn = cls(num_splits * num_features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            n, c, *spatial = x.shape
            viewed = x.contiguous().view(n // self.num_splits, self.num_splits * c, *spatial)
            y = self.split_bn(viewed).view(x.shape)
        else:
            y = self.bn(x)
        if self.weight is None or self.bias is None:
            return y
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return y * self.weight.view(shape) + self.bias.view(shape)

    def aggregate_stats(self) -> None:
        if not self.split_bn.track_running_stats:
            return
        means = self.split_bn.running_mean.view(self.num_splits, -1)
        variances = self.split_bn.running_var.view(self.num_splits, -1)
        mean = sum(means) / self.num_splits
        self.bn.running_mean.copy_(mean)
        self.bn.running_var.copy_(
            sum(variances) / self.num_splits + sum((m - mean) ** 2 for m in means) / self.num_splits
        )
        self.bn.num_batches_tracked.copy_(self.split_bn.num_batches_tracked)
