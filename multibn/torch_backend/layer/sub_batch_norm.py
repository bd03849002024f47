"""Batch normalization of each part of a batch by its own statistics (sub-batch, ghost BN)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from multibn._arrays import is_on_host, values
from multibn._typing import check_bool, check_int
from multibn.communicators import Communicator, CommunicatorLike
from multibn.engine.statistics import reduced_axes
from multibn.torch_backend._torch_private import is_exporting_or_tracing
from multibn.torch_backend.layer import compiled, functional, validation
from multibn.torch_backend.layer.autograd import disable_dispatch_modes_in_recompute
from multibn.torch_backend.layer.base import (
    LOCAL,
    SharingOptions,
    SyncNormBase,
    has_hooks,
    takes_sharing_options,
    updates_running,
)
from multibn.torch_backend.layer.modules import call_node

_STATISTICS = ("running_mean", "running_var")


class SubBatchNormPart(_BatchNorm):
    """`bn` or `split_bn`. The parent layer calls it with `normalize`, so that hooks run."""

    def forward(self, input: Tensor, normalize: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return super().forward(input) if normalize is None else normalize(input)


class _BatchNorm1d(SubBatchNormPart, nn.BatchNorm1d):
    pass


class _BatchNorm2d(SubBatchNormPart, nn.BatchNorm2d):
    pass


class _BatchNorm3d(SubBatchNormPart, nn.BatchNorm3d):
    pass


class _SubBatchNorm(SyncNormBase):
    _part: type[SubBatchNormPart]

    weight: Tensor | None
    bias: Tensor | None

    @takes_sharing_options
    def __init__(
        self,
        num_splits: int,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: CommunicatorLike = LOCAL,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        **options: Unpack[SharingOptions],
    ) -> None:
        for name, value in (("num_splits", num_splits), ("num_features", num_features)):
            check_int(name, value)
        check_bool(affine=affine, bias=bias, track_running_stats=track_running_stats)
        super().__init__()
        self.num_splits = num_splits
        self.num_features = num_features
        self.affine = affine
        for name, is_learned in (("weight", affine), ("bias", affine and bias)):
            data = torch.empty(num_features, device=device, dtype=dtype) if is_learned else None
            self.register_parameter(name, None if data is None else nn.Parameter(data))

        eps, momentum = validation.as_number(eps), validation.as_number(momentum)

        def make(features: int) -> Any:
            part: Any = self._part(
                features, eps, momentum, False, track_running_stats, device, dtype
            )
            part.step_accumulator = None  # as in `SyncNormBase`
            return part

        self.bn = make(num_features)
        self.split_bn = make(num_features * num_splits)
        self.configure(process_group, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight to 1 and bias to 0, and reset the running statistics of both parts."""
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)
        self.bn.reset_running_stats()
        self.split_bn.reset_running_stats()

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        part, num_splits = (self.split_bn, self.num_splits) if self.training else (self.bn, 1)
        shares = self.training and part.training
        communicator: Any = self.layer_communicator if shares else self.local_communicator(input)
        if shares and not torch.compiler.is_compiling():
            self.layer_communicator.refresh_options()  # a part's may have changed
        try:
            validation.check_input(input, self.num_features)
            self._part._check_input_dim(self.bn, input)
            if input.shape[0] % num_splits != 0:
                where = f" on rank {communicator.rank}" if communicator.size > 1 else ""
                raise ValueError(
                    f"`num_splits` must divide the batch size: got {num_splits} splits for a batch "
                    f"of {input.shape[0]}{where}. Use drop_last=True, a different "
                    "`num_splits`, or convert a plain model by `convert_sub_batchnorm`, which "
                    "accepts a batch of any size."
                )
        except (TypeError, ValueError) as error:
            num_statistics = num_splits * self.num_features
            validation.raise_on_all_ranks(error, input, num_statistics, communicator)
        x = input
        if self.training:  # unflatten is a view for any strides; axis 1 is the split of a sample
            x = input.unflatten(0, (input.shape[0] // num_splits, num_splits))
        normalize = partial(self._normalize, part, communicator)
        if isinstance(part, SubBatchNormPart) and not has_hooks(part):
            y = part(x, normalize)
            return y.flatten(0, 1) if self.training else y

        # Hooks, and parts of a user's class, get the tensors of SlowFast's layer: all channels of
        # all splits on axis 1, without weight and bias. This copies an input in channels_last.
        channels = self._channels()

        def normalize_flat(x: Tensor) -> Tensor:
            y = normalize(x.unflatten(1, channels), is_affine=False)
            return y.flatten(1, len(channels))

        options = {"normalize": normalize_flat} if isinstance(part, SubBatchNormPart) else {}
        normalized = y = part(x.flatten(1, len(channels)), **options).reshape(input.shape)
        for p, apply in ((self.weight, torch.mul), (self.bias, torch.add)):
            y = y if p is None else apply(y, p.view(-1, *[1] * (y.ndim - 2)))
        return y.to(normalized.dtype)

    def _normalize(
        self, part: Any, communicator: Communicator, x: Tensor, *, is_affine: bool = True
    ) -> Tensor:
        """Compute the output of `part` for `x` of shape `(N, *_channels(), *spatial)`."""
        channels, args = self._channels(), self._as_input(x, part=part)
        weight, bias = (args.weight, args.bias) if is_affine else (None, None)
        if self.training:  # one weight for all splits: autograd sums the splits' gradients
            weight = None if weight is None else weight.repeat(self.num_splits, 1)
            bias = None if bias is None else bias.repeat(self.num_splits, 1)
        axis = reduced_axes(x.ndim, channel_axes=range(1, 1 + len(channels)))
        args = args._replace(weight=weight, bias=bias, axis=axis)
        running = part.running_mean, part.running_var
        # Without running statistics, exported programs contain torch's batch norm.
        is_exported = not self.training and is_exporting_or_tracing()
        if not part.training and (part.running_mean is not None or is_exported):
            statistics = (None if v is None else v.view(channels) for v in running)
            return functional.normalize_with_running_stats(args, *statistics)
        y, batch = functional.normalize_with_batch_stats(
            args, x.shape[1], communicator, weighting=self.weighting
        )
        if self.training and updates_running(args.running, x):
            with disable_dispatch_modes_in_recompute():
                self.aggregate_stats(batch.count)
        return y

    def _channels(self) -> tuple[int, ...]:
        """Return the shape of a call's statistics: (splits, C) in training, otherwise (C,)."""
        return (self.num_splits, self.num_features) if self.training else (self.num_features,)

    def aggregate_stats(self, count: Tensor | None = None, /) -> None:
        """Compute `bn`'s running statistics, those of the population, from `split_bn`'s.

        Every training step calls this method. Call it yourself only after other code has written to
        the buffers of `split_bn`, as fvcore's `update_bn_stats` does. `num_batches_tracked` is
        copied, too. A training step passes its batch's `count`; if it is 0, nothing changes. Not
        collective.

        By the law of total variance, for splits of equal weight::

            mean = mean over splits of mean_k
            var  = mean over splits of var_k + biased variance over splits of mean_k

        This is SlowFast's formula. With `running_var="biased"` and momentum 1 the result is exactly
        the biased variance of the whole batch. By default var_k is unbiased, as in SlowFast. For n
        elements per channel and split, this adds 1/(n-1) times the mean of the biased var_k.
        """
        whole, split = self.bn, self.split_bn
        if count is not None and not compiled.is_compiling_or_fake(count) and is_on_host(count):
            if not values(count).amax():  # the count is equal across a vmap dimension
                return
            count = None
        if split.running_mean is None:
            return
        wide = torch.float32 if split.running_mean.device.type == "mps" else torch.float64
        shape = (2, self.num_splits, self.num_features)
        means, variances = torch.stack((split.running_mean, split.running_var)).view(shape).to(wide)
        between, mean = torch.var_mean(means, 0, correction=0)
        new = mean, variances.mean(0) + between, split.num_batches_tracked
        old = whole.running_mean, whole.running_var, whole.num_batches_tracked
        for buffer, value in zip(old, new, strict=True):
            buffer.copy_(value if count is None else torch.where(count > 0, value, buffer))

    _num_splits = property(lambda self: self.num_splits)

    def extra_repr(self) -> str:
        return f"{self.num_features}{super().extra_repr()}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        # From the state of a plain batch norm, or of a different number of splits, each split
        # starts with the statistics of the population.
        tracked = (*_STATISTICS, "num_batches_tracked") if self.bn.running_mean is not None else ()
        for name in tracked:
            whole, split = f"{prefix}bn.{name}", f"{prefix}split_bn.{name}"
            plain = state_dict.pop(prefix + name, None)
            if plain is not None:
                state_dict[whole], state_dict[split] = plain, plain.clone()
            if name in _STATISTICS and {whole, split} <= state_dict.keys():
                size = len(state_dict[split])
                if size != self.split_bn.num_features and size % self.num_features == 0:
                    state_dict[split] = state_dict[whole].repeat(self.num_splits)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class SubBatchNorm1d(_SubBatchNorm):
    """The layer of inputs `(N, C)` or `(N, C, L)`. Parameters are those of `SubBatchNorm3d`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SubBatchNorm1d
    >>> layer = SubBatchNorm1d(2, num_features=1, momentum=1.0)
    >>> y = layer(torch.tensor([[1.0], [10.0], [3.0], [30.0]]))  # samples 0 and 2, and 1 and 3
    >>> layer.split_bn.running_mean
    tensor([ 2., 20.])
    """

    _part = _BatchNorm1d


class SubBatchNorm2d(_SubBatchNorm):
    """The layer of inputs `(N, C, H, W)`. Parameters are those of `SubBatchNorm3d`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SubBatchNorm2d
    >>> layer = SubBatchNorm2d(2, num_features=3, momentum=1.0)
    >>> y = layer(torch.ones(4, 3, 5, 5))
    >>> layer.bn.running_mean  # of the population, for evaluation
    tensor([1., 1., 1.])
    """

    _part = _BatchNorm2d


class SubBatchNorm3d(_SubBatchNorm):
    """Batch normalization in which each of `num_splits` parts of the batch has its own statistics.

    For training with large batches per device as if they were small (multigrid training,
    arXiv:1912.00998; ghost batch normalization, arXiv:1705.08741). Sample i belongs to split
    i % num_splits. All splits have the same `weight` and `bias`, shape `(C,)`. Evaluation uses the
    statistics of the whole population, which every training step updates. The layer replaces
    SlowFast's: arguments, numbers, `aggregate_stats`, state dict, and the calls of its two parts
    are the same.

    Parameters
    ----------
    num_splits
        Number of parts, a divisor of every batch size; 1 is plain batch normalization.
    num_features
        Channels C of an input of shape `(N, C, D, H, W)`; the output has its memory format.
    eps, momentum, affine, track_running_stats, device, dtype, bias
        As `SyncBatchNorm`. Without running statistics, evaluation normalizes by the statistics of
        the whole batch.
    process_group, weighting, nonfinite
        As `SyncBatchNorm`, but by default this process alone. With other process groups, split k of
        the global batch consists of split k of every rank.
    running_var
        The variance in the buffers, see `multibn.engine.running_variance`. Its count n is the
        number of elements per channel within one split.

    Attributes
    ----------
    split_bn
        An nn.BatchNorm3d without weight and bias, whose buffers are the splits' running statistics,
        shape `(num_splits * C,)`, split after split. The layer calls it in training. Its eval mode
        freezes the layer: each split is normalized by its own running statistics.
    bn
        The same for the whole population, shape `(C,)`; see `aggregate_stats`. The layer calls `bn`
        in evaluation. If `bn` alone is in training mode, it normalizes by the whole batch and
        updates its running statistics.

    Raises
    ------
    TypeError, ValueError
        As `SyncBatchNorm`, or if `num_splits` is no positive int.

    Notes
    -----
    In training, the call raises as `sync_batch_norm`, and ValueError for a batch that `num_splits`
    does not divide, or whose splits have one value per channel. With a process group, the call is
    collective: every rank must make it, even with an empty batch. It has one allreduce of
    2C*num_splits+4 float64 numbers, and the backward pass has one, too. In evaluation the layer
    does not communicate.

    `load_state_dict` also accepts the state of a plain batch norm, or of a layer with a different
    number of splits: each split then starts with the statistics of the population. `bn` keeps the
    loaded statistics until the next training step.

    Hooks of `bn` and `split_bn` get the tensors that they get in SlowFast's layer: in training, all
    channels of all splits on axis 1, and an output without weight and bias. With hooks, weight and
    bias cost an additional pass, and an input in channels_last is copied.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SubBatchNorm3d
    >>> layer = SubBatchNorm3d(2, num_features=16)
    >>> layer(torch.randn(4, 16, 2, 8, 8)).shape  # two halves, each with its own statistics
    torch.Size([4, 16, 2, 8, 8])
    """

    _part = _BatchNorm3d
