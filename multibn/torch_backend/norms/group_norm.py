"""Group normalization of samples whose spatial axes are split over ranks."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from multibn._typing import Nonfinite
from multibn.communicators import CommunicatorLike
from multibn.engine.plan import NormArgs
from multibn.engine.statistics import BatchStatistics
from multibn.options import NormOptions
from multibn.torch_backend.layer import functional, validation
from multibn.torch_backend.layer.base import SyncNormBase
from multibn.torch_backend.layer.modules import call_node


@dataclass(frozen=True, kw_only=True)
class GroupOptions(NormOptions):
    """Options of group and instance norms; only instance norms use the last two."""

    affine: bool = True
    momentum: float | None = None
    track_running_stats: bool = False


def scale_and_shift(x: Tensor, scale: Any, shift: Any, dtype: torch.dtype) -> Tensor:
    """Return `x * scale + shift`, rounded once to `dtype`. Both are per channel, or None."""
    if scale is not None and shift is not None and x.is_contiguous():
        # With mean 0 and variance 1: one pass forward and two back, where mul and add make copies.
        zeros = x.new_zeros(x.shape[1])
        numbers = scale.to(x.dtype), shift.to(x.dtype), zeros, zeros + 1
        y = torch.batch_norm(x, *numbers, False, 0.0, 0.0, False)
        return functional.align_gradient(y).to(dtype)
    for number, apply in ((scale, torch.mul), (shift, torch.add)):
        x = x if number is None else apply(x, number.view(-1, *[1] * (x.ndim - 2)))
    return x.to(dtype)


class SyncGroupsBase(SyncNormBase):
    """Base class of group and instance norms whose samples are split over ranks."""

    Options = GroupOptions

    eps: float
    num_groups: Any
    weight: Any
    bias: Any
    converted_from: ClassVar[type[nn.Module]]

    def __init__(
        self,
        *args: Any,
        process_group: CommunicatorLike = None,
        nonfinite: Nonfinite = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(*args, **torch_options)
        self.configure(process_group, nonfinite=nonfinite)

    def detail(self, channels: int) -> str:
        return f", N={channels // self.num_groups}, num_groups={self.num_groups}"

    def normalize(self, x: Any, num_channels: int) -> tuple[Tensor, BatchStatistics]:
        """Normalize each group of each sample over all ranks. Collective.

        Return the output and the batch statistics, which have shape `(N, num_groups)`.
        """
        group, num_groups = self.layer_communicator, self.num_groups
        try:
            validation.check_input(x, num_channels)
        except (TypeError, ValueError) as error:
            is_array = isinstance(x, Tensor) and not x.is_nested and x.ndim > 1
            num_statistics = len(x) * num_groups if is_array else None
            validation.raise_on_all_ranks(error, x, num_statistics, group)
        wide = torch.promote_types(x.dtype, torch.float32)
        grouped = x.to(wide).unflatten(1, (num_groups, num_channels // num_groups))
        args = NormArgs(grouped, None, None, self.eps, tuple(range(2, grouped.ndim)))
        y, batch = functional.normalize_with_batch_stats(
            args, num_groups, group, weighting="element"
        )
        return scale_and_shift(y.flatten(1, 2), self.weight, self.bias, x.dtype), batch


class SyncGroupNorm(SyncGroupsBase, nn.GroupNorm):
    """Group normalization of samples whose spatial axes are split over ranks.

    Ranks that split images, volumes or videos along height, depth or time get the output and the
    gradients of nn.GroupNorm (Wu & He, 2018, arXiv:1803.08494) on the whole samples, for any split,
    empty parts included. Arguments, numbers and state dicts are those of nn.GroupNorm;
    `process_group` and `nonfinite` are as in `SyncBatchNorm`. The variance is biased.

    Collective, in evaluation, too: every rank of `process_group` must call the layer, with the same
    N samples. One allreduce each way, of 2NG+4 and 2NG+2 float64 numbers for G groups, and one more
    for each new N. Gradients of weight and bias are sums over this rank's part: add them over the
    ranks that share a sample.

    Raises
    ------
    TypeError, ValueError
        If the input does not have shape `(N, num_channels, *spatial)` or is not floating-point.
    RuntimeError
        On all ranks, if N differs between ranks. On the other ranks, if one rank's input is wrong.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncGroupNorm
    >>> layer = SyncGroupNorm(2, 4)  # 4 channels in 2 groups
    >>> layer(torch.randn(1, 4, 8, 8)).shape
    torch.Size([1, 4, 8, 8])
    """

    converted_from = nn.GroupNorm

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        return self.normalize(input, self.num_channels)[0]
