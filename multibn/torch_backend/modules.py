"""Batch normalization layers for torch."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn import population, recompute
from multibn._typing import RunningVar, Weighting, check_choice
from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators._names import find_path
from multibn.communicators.conversation import Conversation
from multibn.statistics import BatchStatistics
from multibn.torch_backend import _data_parallel, compiled, functional
from multibn.torch_backend._autograd import Input

_ALONE = SingleProcess()
compiled.register(_ALONE)


class Synchronized(nn.Module):
    """What all layers have in common that share statistics: with whom, and their conventions."""

    def configure(
        self,
        process_group: Any,
        *,
        weighting: Weighting = "element",
        running_var: RunningVar = "unbiased_global",
    ) -> None:
        """Choose who shares statistics, and the conventions; arguments as the constructor's.

        Not collective.
        """
        check_choice("weighting", weighting, Weighting)
        check_choice("running_var", running_var, RunningVar)
        self.process_group = process_group
        self.weighting: Weighting = weighting
        self.running_var_convention: RunningVar = running_var

    @property
    def process_group(self) -> Communicator:
        """The ranks that share statistics, as a communicator."""
        return self._communicator.wrapped

    @process_group.setter
    def process_group(self, obj: Any) -> None:
        # Held by the layer only, and holding it in no way: a copy of the layer makes its own.
        layer = weakref.ref(self)
        self._communicator = Conversation(as_communicator(obj), lambda: _name(layer()))
        compiled.register(self._communicator)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_communicator": self.process_group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = self.__dict__.pop("_communicator")


def _name(layer: nn.Module | None) -> str:
    """What its model's state dict calls a layer, as far as the running forward pass tells."""
    if layer is None:
        return "a layer"
    path = find_path(layer, nn.Module, lambda model: model.named_modules())
    # What DistributedDataParallel and torch.compile add.
    steps = [step for step in path.split(".") if step not in ("module", "_orig_mod")]
    return ".".join(steps) or type(layer).__qualname__


def update_buffers(
    bn: _BatchNorm, batch: BatchStatistics, local_count: int, convention: RunningVar
) -> bool:
    """Write the running statistics of `bn`; `local_count` is this rank's elements per channel.

    Returns False, and writes nothing, in a pass that runs again. Compiled code does not know
    whether it runs in one: `batch.count` is 0 there, so that the values written are the old ones.
    """
    if bn.running_mean is None or bn.running_var is None:
        return False
    compiling = torch.compiler.is_compiling()
    if not compiling:
        if recompute.in_recomputing():
            return False
        _data_parallel.watch_active(Synchronized)
    if not compiling and batch.count.is_cpu:  # numbers are faster than tensors of one
        batch = batch._replace(count=batch.count.item())
        counted: Any = int(batch.count > 0)
    else:
        counted = batch.count > 0
    momentum: float | Tensor = bn.momentum or 0.0
    if bn.num_batches_tracked is not None:
        bn.num_batches_tracked.add_(counted)
        if bn.momentum is None:  # 1/n, left on the device; nothing is read if all ranks are empty
            momentum = bn.num_batches_tracked.clamp(min=1).double().reciprocal().to(batch.mean)
    if batch.mean.ndim > 1:
        batch = batch._replace(mean=batch.mean.flatten(), var=batch.var.flatten())
    mean, var = (compiled if compiling else population).update_running(
        bn.running_mean,
        bn.running_var,
        batch,
        momentum=momentum,
        local_count=local_count,
        convention=convention,
    )
    bn.running_mean.copy_(mean)
    bn.running_var.copy_(var)
    return True


class SyncBatchNorm(Synchronized, _BatchNorm):
    """Batch normalization over the batches of all ranks of a process group.

    N ranks give the numbers that one process gives on the concatenated batch, on any device and
    backend, for any split of the batch, empty ranks included. The layer takes the place of
    torch.nn.SyncBatchNorm and of nn.BatchNorm1d, 2d and 3d, whose state dicts it shares. It derives
    from their base class and not from nn.SyncBatchNorm, which DistributedDataParallel refuses on
    CPU.

    In training, the forward pass is collective: every rank must call it, with one allreduce of 2C+4
    float64 numbers, and one in the backward pass: the moments or sums, and what tells whether all
    ranks are in the same place. A layer's first call has one more, of a fixed size. In evaluation
    nothing is communicated.

    Parameters
    ----------
    num_features
        Channels C of an input of shape `(N, C, *spatial)`.
    eps, momentum, affine, track_running_stats, device, dtype, bias
        As torch's batch norms; `momentum=None` keeps the cumulative average.
    process_group
        Anything that `multibn.as_communicator` takes: None for the default process group where one
        is initialised when the layer is first used, else this process alone.
    weighting
        What a rank counts for: `"element"`, its elements per channel (the concatenated batch),
        `"sample"`, its batch size, or `"rank"`, the same as every other that is not empty.
    running_var
        The variance kept in the buffer of this name: `"unbiased_global"` (torch),
        `"unbiased_local"` (ChainerMN) or `"biased"` (detectron2), see `multibn.running_variance`.
    fuse_relu
        Whether a ReLU follows inside of the layer; `layer(input, residual)` adds a tensor like the
        input before it. On a GPU both cost no pass of their own. Nothing else needs the values
        before the ReLU, so they are not kept.

    Raises
    ------
    ValueError
        If `num_features` is not positive, or `weighting` or `running_var` is none of those above.
    TypeError, ValueError
        If `process_group` is no communicator, or this process is not part of it.

    Notes
    -----
    In training, the call raises ValueError or TypeError for an input that does not fit, and
    RuntimeError on the other ranks; on all ranks ValueError if they hold one value per channel
    together, FloatingPointError if the statistics are not finite, and RuntimeError if the ranks are
    in different layers. An empty batch on all ranks changes nothing.
    """

    # The class that `convert_sync_batchnorm` found, for `revert_sync_batchnorm`.
    converted_from: type[_BatchNorm] | None = None
    fuse_relu = False  # of layers that were converted, or saved by an older version

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        weighting: Weighting = "element",
        running_var: RunningVar = "unbiased_global",
        fuse_relu: bool = False,
    ) -> None:
        if num_features <= 0:
            raise ValueError(f"`num_features` must be positive: got {num_features}.")
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if affine and not bias:  # torch before 2.13 has no such argument
            self.register_parameter("bias", None)
        self.configure(process_group, weighting=weighting, running_var=running_var)
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if not self.training and self.running_mean is not None and self.running_var is not None:
            functional.check_input(input, self.num_features)
            y = functional.normalize_by_running(
                input, self.weight, self.bias, self.running_mean, self.running_var, eps=self.eps
            )
            return functional.add_relu(y, residual, self.fuse_relu)
        y, batch = compiled.forward(
            Input(input, self.weight, self.bias, self.eps, residual=residual, relu=self.fuse_relu),
            self.num_features,
            self._communicator if self.training else _ALONE,
            weighting=self.weighting,
        )
        self.track(batch, input)
        return y

    def track(self, batch: BatchStatistics, input: Tensor) -> None:
        """Update the running statistics, if they are to be, by those of the batch of `input`."""
        if self.training and self.track_running_stats:
            local_count = input.numel() // self.num_features
            update_buffers(self, batch, local_count, self.running_var_convention)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions from 2: `forward` checks."""

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, process_group={self.process_group}, "
            f"weighting={self.weighting!r}, running_var={self.running_var_convention!r}"
            f"{', fuse_relu=True' if self.fuse_relu else ''}"
        )
