"""The layers that multibn replaces: the originals, or their formula if they do not run here."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from multibn import Communicator


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        summed: Tensor = communicator.allreduce(x)
        return summed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.communicator.allreduce(grad_outputs[0]), None


class NaiveFormula(nn.Module):
    """The formula of detectron2's and TimeSformer's NaiveSyncBatchNorm, in plain autograd.

    Means of x and of x*x, averaged over the ranks by one differentiable message in float32. The
    originals gather and add; the sum here is cheaper, so the comparison favours the peer.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self._statistics(x) if self.training else (self.running_mean, self.running_var)
        scale = self.weight * torch.rsqrt(var + 1e-5)
        shift = self.bias - mean * scale
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return x * scale.view(shape) + shift.view(shape)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        axis = [0, *range(2, x.ndim)]
        local = torch.cat([torch.mean(x, axis), torch.mean(x * x, axis)])
        summed = _SumOverRanks.apply(local, self.communicator)
        mean, mean_sqr = (summed / self.communicator.size).chunk(2)
        var = mean_sqr - mean * mean
        with torch.no_grad():
            self.running_mean += 0.1 * (mean - self.running_mean)
            self.running_var += 0.1 * (var - self.running_var)
        return mean, var


def chainermn_link(num_channels: int, comm: Any) -> Any:
    """ChainerMN's link over ChainerMN's communicator `comm`; silences the link's own warnings."""
    import chainermn

    # The link calls itself experimental, and reads `_device_id`, which Chainer 7 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "Link._device_id", DeprecationWarning)
    return chainermn.links.MultiNodeBatchNormalization(num_channels, comm)
