"""Instance normalization of samples whose spatial axes are split over ranks."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from multibn.engine.plan import NormArgs
from multibn.kernels import Running
from multibn.torch_backend.layer import functional, validation
from multibn.torch_backend.layer.autograd import disable_dispatch_modes_in_recompute
from multibn.torch_backend.layer.base import updates_running
from multibn.torch_backend.layer.modules import call_node
from multibn.torch_backend.norms.group_norm import SyncGroupsBase


class _SyncInstanceNorm(SyncGroupsBase, _NormBase):
    num_groups = property(lambda self: self.num_features)
    _get_no_batch_dim: Any

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        x: Any = input
        is_sample = isinstance(x, Tensor) and x.ndim == self._get_no_batch_dim()
        x = x.unsqueeze(0) if is_sample else x
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            y, _ = self.normalize(x, self.num_features)
        elif self.training:
            y, batch = self.normalize(x, self.num_features)
            running = Running(mean, var, self.momentum or 0.0)
            if len(x) and updates_running(running, x):
                means = batch.mean.mean(0), batch.var.mean(0)  # over samples
                with disable_dispatch_modes_in_recompute():
                    torch.ops.multibn.update_running(*running, *means, batch.count, batch.count)
        else:
            validation.check_input(x, self.num_features)
            axis = validation.non_channel_axes(x)
            args = NormArgs(x, self.weight, self.bias, self.eps, axis)
            y = functional.normalize_with_running_stats(args, mean, var)
        return y.squeeze(0) if is_sample else y


class SyncInstanceNorm1d(_SyncInstanceNorm, nn.InstanceNorm1d):
    """Instance normalization of `(N, C, L)` or `(C, L)`, with L split over ranks.

    Arguments, numbers and state dicts are those of nn.InstanceNorm1d; `process_group` and
    `nonfinite` are as in `SyncBatchNorm`. Collective like `SyncGroupNorm` with one group per
    channel. With `track_running_stats=True`, the running statistics average each sample's mean and
    unbiased variance; evaluation uses the running statistics and does not communicate.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncInstanceNorm1d
    >>> SyncInstanceNorm1d(1)(torch.tensor([[[1.0, 3.0]], [[10.0, 30.0]]])).flatten()
    tensor([-1.0000,  1.0000, -1.0000,  1.0000])
    """

    converted_from = nn.InstanceNorm1d


class SyncInstanceNorm2d(_SyncInstanceNorm, nn.InstanceNorm2d):
    """Instance normalization of `(N, C, H, W)` or `(C, H, W)`, split along H or W.

    Arguments are those of nn.InstanceNorm2d, `process_group` and `nonfinite`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncInstanceNorm2d
    >>> SyncInstanceNorm2d(3, affine=True)(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    converted_from = nn.InstanceNorm2d


class SyncInstanceNorm3d(_SyncInstanceNorm, nn.InstanceNorm3d):
    """Instance normalization of `(N, C, D, H, W)` or `(C, D, H, W)`, split along D, H or W.

    Arguments are those of nn.InstanceNorm3d, `process_group` and `nonfinite`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncInstanceNorm3d
    >>> SyncInstanceNorm3d(3)(torch.randn(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """

    converted_from = nn.InstanceNorm3d
