"""One update of the running statistics for all forward passes of an optimizer step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from multibn._typing import RunningVar
from multibn.engine.running import StepAccumulator
from multibn.kernels import Running
from multibn.torch_backend.layer.autograd import (
    disable_dispatch_modes_in_recompute,
    running_stats_of,
)
from multibn.torch_backend.layer.base import LayerOptions, SyncNormBase, check_module


@contextmanager
def step_statistics(model: nn.Module) -> Iterator[None]:
    """Update the running statistics of `model` once for all forward passes in this context.

    Use this for optimizer steps with several forward passes: gradient accumulation, micro-batches
    of a pipeline, or a loss of several outputs of the model. At exit, the running statistics are
    updated once with the combined statistics of all batches, and `num_batches_tracked` is
    incremented by one. Each forward pass still uses its own batch statistics. Not collective.

    Parameters
    ----------
    model
        The model, wrapped or not. Only multibn's layers are affected; other batch norms update
        their running statistics in each forward pass.

    Raises
    ------
    ValueError
        If `model` has no layer of multibn.torch.

    Notes
    -----
    Batches are weighted by their global number of elements. With `weighting="element"`, the result
    is that of the concatenated batch. With other weightings, this is true if all ranks split their
    batches in the same proportions.

    Recomputed passes and layers in evaluation add nothing; evaluation uses the running statistics
    from before the step. The running statistics stay unchanged after an exception, without a
    training batch, and if `nonfinite` of `SyncBatchNorm` skips a batch, as a GradScaler then skips
    the step, too. Nested contexts do nothing. Copies of a layer made inside are not included. A
    compiled model is compiled once more for this context.

    torchgpipe's `DeferredBatchNorm` (Kim et al., 2020, arXiv:2004.09910) does this in one process.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import SyncBatchNorm, step_statistics
    >>> layer = SyncBatchNorm(1, momentum=1.0)
    >>> with step_statistics(layer):
    ...     for x in torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]]):
    ...         y = layer(x)
    >>> layer.running_mean, layer.num_batches_tracked
    (tensor([4.]), tensor(1))
    """
    check_module("model", model)
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, SyncNormBase)]
    if not layers:
        raise ValueError(
            "`model` must have a layer of multibn.torch: got none in "
            f"{type(model).__qualname__}. Call convert_sync_batchnorm(model) first; to use one "
            "process alone, with process_group=multibn.SingleProcess()."
        )
    entered: list[tuple[Any, Any, StepAccumulator, RunningVar]] = []
    for layer in layers:
        parts = (layer.split_bn, layer.bn) if hasattr(layer, "split_bn") else (layer,)
        convention = layer.running_var_convention
        # Group and instance norms have statistics of single samples, which are not combined.
        for bn in parts if issubclass(layer.Options, LayerOptions) else ():
            running = running_stats_of(bn, convention)
            if isinstance(running, Running):  # neither None nor the accumulator of another step
                # MPS has no float64. Compiled code cannot choose the dtype.
                dtype = None if running.mean.device.type == "mps" else torch.float64
                bn.step_accumulator = StepAccumulator(torch.zeros_like(running.mean, dtype=dtype))
                entered.append((layer, bn, bn.step_accumulator, convention))
    try:
        yield
    finally:
        for _, bn, step_accumulator, _ in entered:
            # A layer that was reverted inside the context has no accumulator.
            if getattr(bn, "step_accumulator", None) is step_accumulator:
                bn.step_accumulator = None
    for layer, bn, step_accumulator, convention in entered:
        # Look up the buffers again: `layer.double()` may have replaced them.
        running = running_stats_of(bn, convention)
        if not isinstance(running, Running):
            continue
        if step_accumulator.momentum is not None:
            running = running._replace(momentum=step_accumulator.momentum)
        with disable_dispatch_modes_in_recompute():
            batch, local_count = step_accumulator.compute()
            torch.ops.multibn.update_running(*running, *batch[:3], local_count)
            if bn is getattr(layer, "split_bn", None):
                layer.aggregate_stats(batch.count)
