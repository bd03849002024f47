"""Batch normalization of each part of a batch, for converted layers (ghost batch norm)."""

import torch
from torch import Tensor

from multibn._typing import Weighting
from multibn.communicators import Communicator
from multibn.engine import step
from multibn.engine.population import Pool
from multibn.engine.statistics import BatchStatistics, channels
from multibn.engine.step import Input
from multibn.kernels import Running
from multibn.torch_backend.layer import compiled, functional


def forward(
    i: Input,
    num_splits: int,
    num_channels: list[int],
    communicator: Communicator,
    weighting: Weighting,
) -> tuple[Tensor, BatchStatistics]:
    """Normalize each split of `i` by its own statistics; move and return those of the whole."""
    x, running = i.x, i.running
    if communicator.size > 1:  # whose batches may have unequal numbers of parts
        raise ValueError(
            f"`process_group` must be one process for a layer that splits its batch: got "
            f"{communicator.size}. Build the model with SubBatchNorm1d, 2d or 3d."
        )
    functional.check_input(x, *num_channels)
    if not x.is_meta:
        functional.check_options(i)
    shape = channels(x.shape, i.axis)
    # Each split has two elements per channel, masked ones too, if the batch has: the last batch may
    # be small.
    num_splits = max(1, min(num_splits, len(x), x.numel() // shape[0] // 2))
    splits = [
        [None] * num_splits if t is None else t.tensor_split(num_splits)
        for t in (x, i.residual, i.mask)
    ]
    pool = None
    if running is not None:
        dtype = None if x.device.type == "mps" else torch.float64  # a device without float64
        pool = Pool(torch.zeros(shape, device=x.device, dtype=dtype))
    inputs = [
        i._replace(x=part, residual=residual, mask=mask, running=pool)
        for part, residual, mask in zip(*splits, strict=True)
    ]
    num_channels = num_channels * num_splits
    results = compiled.forward_all(inputs, num_channels, communicator, weighting=weighting)
    y = torch.cat([y for y, _ in results])
    if pool is None:  # nobody reads the statistics
        return y, results[0][1]
    batch, local_count = pool.compute()
    # With one part, the whole batch is skipped: nothing moves.
    is_skipped = torch.stack([part.mean for _, part in results]).isnan().any()
    batch = batch._replace(count=torch.where(is_skipped, 0.0, batch.count))
    if isinstance(running, Running) and compiled.takes(x):
        torch.ops.multibn.move(*running, *batch[:3], local_count)
    else:
        step.move(running, batch, local_count)
    return y, batch
