"""Batch renormalization (Ioffe, 2017, arXiv:1702.03275) with statistics of all ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from multibn._typing import check_ints, check_number
from multibn.kernels import reference
from multibn.torch_backend.layer import base, functional, modules, validation
from multibn.torch_backend.norms.group_norm import scale_and_shift
from multibn.torch_backend.norms.read_once import read_once


@dataclass(frozen=True, kw_only=True)
class RenormOptions(base.LayerOptions):
    rmax: float = 3.0
    dmax: float = 5.0
    schedule: tuple[int, ...] = (5000, 40000, 25000)

    def check(self) -> None:
        super().check()
        check_number("rmax", self.rmax, "[1, inf)")
        check_number("dmax", self.dmax, "[0, inf)")
        if not isinstance(self.schedule, tuple) or len(self.schedule) != 3:
            raise TypeError(f"`schedule` must be a tuple of three ints: got {self.schedule!r}.")
        check_ints("schedule", self.schedule, 0)


class SyncBatchRenormBase(modules.SyncBatchNorm):
    Options = RenormOptions

    def __init__(
        self,
        num_features: int,
        *args: Any,
        rmax: float = 3.0,
        dmax: float = 5.0,
        schedule: tuple[int, int, int] = (5000, 40000, 25000),
        **bn_args: Any,
    ) -> None:
        super().__init__(num_features, *args, **bn_args)
        self.rmax, self.dmax, self.schedule = rmax, dmax, schedule
        self.norm_options.check()
        clips = torch.tensor([rmax, dmax], dtype=torch.float64, device=None)
        self.register_buffer("clips", clips, persistent=False)

    def forward(
        self, input: Tensor, residual: Any = None, *, mask: Any = None, lengths: Any = None
    ) -> Tensor:
        buffers: Any = self.running_mean, self.running_var, self.num_batches_tracked, self.clips
        if not self.training or buffers[0] is None or isinstance(input, fx.Proxy):
            return super().forward(input, residual, mask=mask, lengths=lengths)
        sharing: Any = self.num_features, self.layer_communicator
        try:
            validation.check_input(input, self.num_features)
            self._check_input_dim(input)
        except (TypeError, ValueError) as error:
            validation.raise_on_all_ranks(error, input, *sharing)
        where = validation.mask_of(input, mask, lengths, *sharing)
        mean, var, n, clips = read_once(input, *buffers)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        args = self._as_input(x, None, where)._replace(weight=None, bias=None)
        y, batch = functional.normalize_with_batch_stats(args, *sharing, weighting=self.weighting)
        start, *ends = self.schedule
        rise = [((n.double() - start + 1) / (max(end - start, 0) + 1)).clamp(0, 1) for end in ends]
        rmax, dmax = 1 + (clips[0] - 1) * rise[0], clips[1] * rise[1]
        invstd = reference.invstd_of(var.double(), args)
        ratio = invstd / reference.invstd_of(batch.var, args)
        r = torch.clamp(ratio, 1 / rmax, rmax).to(x.dtype)
        d = torch.clamp((batch.mean - mean) * invstd, -dmax, dmax).to(x.dtype)
        weight, bias = (v if p is None else p for p, v in ((self.weight, 1), (self.bias, 0)))
        y = scale_and_shift(y, r * weight, d * weight + bias, input.dtype)
        return reference.masked(y if residual is None else y + residual, where)


class SyncBatchRenorm1d(SyncBatchRenormBase, modules.SyncBatchNorm1d):
    """Batch renormalization of `(N, C)` or `(N, C, L)` over the batches of all ranks.

    In training, `y = ((x - mean) / std * r + d) * weight + bias`. Without gradients, r is `std /
    running_std`, clipped to [1/rmax, rmax], and d is `(mean - running_mean) / running_std`, clipped
    to [-dmax, dmax]. All else is as in `SyncBatchNorm`; state dicts are those of batch norms.

    Parameters
    ----------
    num_features, *args, rmax, dmax, schedule, **bn_args
        As for `SyncBatchNorm`, except `fuse_relu`; the final limits of r and d, in the buffer
        `clips`; batch counts: r is 1 and d is 0 until the first, then the limits rise linearly, to
        rmax at the second and dmax at the third.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncBatchRenorm1d
    >>> layer = SyncBatchRenorm1d(1, schedule=(0, 0, 0), affine=False)
    >>> layer(torch.tensor([[1.0], [3.0]])).flatten()  # running mean 0, variance 1
    tensor([1.0000, 3.0000])
    """


class SyncBatchRenorm2d(SyncBatchRenormBase, modules.SyncBatchNorm2d):
    """Batch renormalization of `(N, C, H, W)`. Parameters are those of `SyncBatchRenorm1d`.

    Examples
    --------
    >>> from multibn.torch import SyncBatchRenorm2d
    >>> SyncBatchRenorm2d(8, rmax=2.0).clips
    tensor([2., 5.], dtype=torch.float64)
    """


class SyncBatchRenorm3d(SyncBatchRenormBase, modules.SyncBatchNorm3d):
    """Batch renormalization of `(N, C, D, H, W)`. Parameters are those of `SyncBatchRenorm1d`.

    Examples
    --------
    >>> from multibn.torch import SyncBatchRenorm3d
    >>> SyncBatchRenorm3d(8).schedule
    (5000, 40000, 25000)
    """
