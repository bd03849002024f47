"""Batch normalization layers for torch."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from typing_extensions import Unpack

from multibn._typing import check_bool, check_int
from multibn.communicators import Communicator, CommunicatorLike
from multibn.engine.plan import NormArgs
from multibn.torch_backend._torch_private import is_exporting_or_tracing
from multibn.torch_backend.layer import autograd, functional, validation
from multibn.torch_backend.layer.autograd import running_stats_of
from multibn.torch_backend.layer.base import (
    LOCAL,
    SharingOptions,
    SyncNormBase,
    takes_sharing_options,
)
from multibn.torch_backend.layer.step_statistics import step_statistics


def call_node(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Add a node that calls `layer` to a torch.fx graph, as torch.fx does for torch's layers.

    At least one argument must be a torch.fx.Proxy.
    """
    proxy = next(a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy))
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(layer)
    node: Tensor = tracer.create_proxy("call_module", path, args, kwargs)
    return node


def without_none(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, as only these appear in a torch.fx graph."""
    return {name: value for name, value in options.items() if value is not None}


class SyncBatchNorm(SyncNormBase, _BatchNorm):
    """Batch normalization over the batches of all ranks of a process group.

    For each channel, over the elements of all ranks together::

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    The variance in the formula is biased. In evaluation, the running mean and variance take the
    places of mean(x) and var(x), and the layer does not communicate.

    N ranks compute the same result as one process on the concatenated batch, on any device and
    backend, for any split of the batch, empty ranks included. The layer replaces
    torch.nn.SyncBatchNorm and nn.BatchNorm1d, 2d and 3d, and has the same state dict. It does not
    derive from nn.SyncBatchNorm, which DistributedDataParallel rejects on CPU.

    In training, the forward pass is collective: every rank must call it. The forward pass has one
    allreduce of 2C+4 float64 numbers, the backward pass one of 2C+2: moments or sums, and a
    fingerprint that detects ranks in different layers. A layer's first call has one more
    allreduce, of a fixed size.

    For a DTensor input, the placements determine which ranks share; see docs/guides/dtensors.md.

    Parameters
    ----------
    num_features
        Channels C of an input of shape `(N, C, *spatial)`.
    eps, momentum, affine, track_running_stats, device, dtype, bias
        As torch's batch norms; `momentum=None` keeps the cumulative average.
    process_group
        Anything that `multibn.as_communicator` takes. None stands for the default process group if
        one is initialized when the layer is first used, otherwise for this process alone.
    weighting
        How ranks are weighted: `"element"`, by elements per channel, exact for any split (the
        statistics of the concatenated batch); `"sample"`, by batch size, which reproduces mode "N"
        of detectron2; `"rank"`, equally, ignoring empty ranks, which reproduces ChainerMN, SlowFast
        and detectron2 and is biased if ranks have unequal batches.
    running_var
        Which variance is stored in `running_var`: `"unbiased_global"` (torch), `"unbiased_local"`
        (ChainerMN) or `"biased"` (detectron2), see `multibn.engine.running_variance`.
    nonfinite
        What to do if a rank's input contains NaN, infinity or values that overflow: `"raise"`
        FloatingPointError on all ranks, or `"skip"` the batch: the output is NaN on all ranks, so
        that a GradScaler skips the step; running statistics are not updated, and a RuntimeWarning
        names the layer and the ranks with such input. None: `"skip"` for float16, `"raise"` for
        other dtypes.
    fuse_relu
        Apply a fused ReLU; `layer(input, residual)` adds `residual`, a tensor like the input,
        before it. On a GPU both are fused into the same kernel and the pre-activation is not
        stored.

    Raises
    ------
    TypeError, ValueError
        If `process_group` is no communicator, or this process is not part of it; `num_features` is
        no positive int, `eps` is no positive number, `momentum` is neither None nor in [0, 1], or
        `weighting`, `running_var` or `nonfinite` is unknown. A call raises as `sync_batch_norm`.

    Notes
    -----
    `layer(input, mask=mask)` leaves elements out: `mask` has dtype bool, True for the elements that
    count, and the shape `(N, *spatial)`, or one that broadcasts to it, on the device of the input.
    torch's `key_padding_mask`, True for padding, is the opposite: pass `~key_padding_mask`. For
    samples that are padded at the end, `layer(input, lengths=lengths)` takes integers of shape
    `(N,)` and an input `(N, C, L)` or `(N, C, L, ...)`. In sample n, the first `lengths[n]`
    positions along L count.

    Masked-out elements do not affect statistics or gradients, even if they are NaN or infinite. The
    output is 0 there, also in evaluation, and so is the gradient. Counts, unbiased variances and
    the weights of ranks are those of the elements that count, or of the samples that have one. A
    rank's mask may be all False, but if all ranks' masks are, ValueError is raised on all ranks. On
    a GPU these checks are skipped, to avoid a device synchronization, and lengths beyond L are
    clamped to L.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncBatchNorm
    >>> layer = SyncBatchNorm(2)
    >>> y = layer(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> layer.running_mean
    tensor([0.2000, 2.0000])
    """

    # The class that `revert_sync_batchnorm` restores; None for `BatchNorm`.
    converted_from: type[_BatchNorm] | None = None
    # The process group of the nn.SyncBatchNorm that was converted, if any.
    original_process_group: Communicator | None = None
    _num_splits = 1  # see `convert_sub_batchnorm`
    convert_sync_batchnorm: ClassVar[Callable[..., Any]]  # set in torch_backend/__init__.py

    @takes_sharing_options
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: CommunicatorLike = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        fuse_relu: bool = False,
        **options: Unpack[SharingOptions],
    ) -> None:
        check_int("num_features", num_features)
        check_bool(affine=affine, bias=bias, track_running_stats=track_running_stats)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if affine and not bias:  # torch before 2.13 has no such argument
            self.register_parameter("bias", None)
        self.fuse_relu = fuse_relu
        self.configure(process_group, **options)

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        is_plain = self.training and mask is lengths is None and self._num_splits == 1
        if is_plain and type(input) is Tensor and not torch.compiler.is_compiling():
            args = self._as_input(input, residual)
            plan = self.layer_communicator.plans.get(autograd.plan_key(args, self.weighting))
            if plan is not None:
                y: Tensor = autograd.apply((plan, args), input, args.weight, args.bias, residual)[0]
                return y
        return self._forward_general(input, residual, mask=mask, lengths=lengths)

    def _forward_general(
        self, input: Any, residual: Tensor | None, *, mask: Tensor | None, lengths: Tensor | None
    ) -> Any:
        """Run `forward` without a plan: in evaluation or compiled code, or for a new input."""
        if isinstance(input, fx.Proxy):
            options = without_none(residual=residual, mask=mask, lengths=lengths)
            return call_node(self, input, **options)
        communicator: Communicator = self.layer_communicator if self.training else LOCAL
        check = type(self)._check_input_dim
        try:
            if isinstance(input, Tensor) and check is not _NormBase._check_input_dim:
                check(self, input)
        except ValueError as error:
            validation.raise_on_all_ranks(error, input, self.num_features, communicator)
        mean, var = self.running_mean, self.running_var
        uses_batch_stats = self.training or mean is None or var is None
        if uses_batch_stats and not self.training:
            communicator = self.local_communicator(input)
            uses_batch_stats = not (mask is lengths is None and is_exporting_or_tracing())
        mask = validation.mask_of(input, mask, lengths, self.num_features, communicator)
        args = self._as_input(input, residual, mask)
        if uses_batch_stats:
            if self.training and self._num_splits > 1:
                return self.forward_splits(args, self.num_features)
            return functional.normalize_with_batch_stats(
                args, self.num_features, communicator, weighting=self.weighting
            )[0]
        validation.check_input(input, self.num_features)
        if residual is not None:
            validation.check_options(args)
        return functional.normalize_with_running_stats(args, mean, var)

    def forward_splits(
        self, args: NormArgs, num_channels: int, momentum: float | None = None
    ) -> Tensor:
        """Normalize each part of a batch by its own statistics, see `convert_sub_batchnorm`.

        Pass `momentum` if the caller has already incremented `num_batches_tracked`.
        """
        validation.check_no_tensor_subclass("the input", args.x)
        validation.check_input(args.x, num_channels)
        validation.check_options(args)
        N, n = len(args.x), self._num_splits
        if self.layer_communicator.size == 1:
            # Fewer parts for a small (last) batch: each needs two elements per channel.
            n = max(1, min(n, N, args.x.numel() // args.x.shape[1] // 2))
        sizes = [(N + k) // n for k in reversed(range(n))]
        # Not tensor_split, whose backward allocates a gradient of the whole size for each part.
        whole = args.x, args.residual, args.mask
        splits = [[None] * n if v is None else v.split(sizes) for v in whole]
        ys = []
        with step_statistics(self):
            for x, residual, mask in zip(*splits, strict=True):
                running = running_stats_of(self, self.running_var_convention, momentum)
                part = args._replace(x=x, residual=residual, mask=mask, running=running)
                y, _ = functional.normalize_with_batch_stats(
                    part, num_channels, self.layer_communicator, weighting=self.weighting
                )
                ys.append(y)
        return torch.cat(ys)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """A `SyncBatchNorm` for inputs `(N, C)` or `(N, C, L)`; also an nn.BatchNorm1d.

    `convert_sync_batchnorm` makes this layer of an nn.BatchNorm1d. Inputs with other numbers of
    dimensions raise ValueError on all ranks. The parameters are those of `SyncBatchNorm`.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch import SyncBatchNorm1d
    >>> isinstance(SyncBatchNorm1d(4), nn.BatchNorm1d)
    True
    """

    converted_from = nn.BatchNorm1d


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """A `SyncBatchNorm` for inputs `(N, C, H, W)`. Parameters are those of `SyncBatchNorm1d`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncBatchNorm2d
    >>> layer = SyncBatchNorm2d(8, fuse_relu=True)
    >>> layer(torch.randn(2, 8, 4, 4)).min()
    tensor(0., grad_fn=<MinBackward1>)
    """

    converted_from = nn.BatchNorm2d


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """A `SyncBatchNorm` for inputs `(N, C, D, H, W)`. Parameters are those of `SyncBatchNorm1d`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncBatchNorm3d
    >>> layer = SyncBatchNorm3d(8, process_group="machine")  # video, shared inside each machine
    >>> layer(torch.randn(2, 8, 4, 6, 6)).shape
    torch.Size([2, 8, 4, 6, 6])
    """

    converted_from = nn.BatchNorm3d
