"""Agreement of the ranks' running statistics."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn._typing import check_choice
from multibn.kernels.generic import as_wide
from multibn.torch_backend.participants import participants

How: TypeAlias = Literal["broadcast", "pool"]


@torch.no_grad()
def sync_running_stats(model: nn.Module, process_group: Any = None, how: How = "broadcast") -> None:
    """Make the running statistics of all ranks equal.

    For layers that kept statistics of their own rank, before evaluating or saving.
    Collective: every rank must call it, with the same model; one allreduce.

    Parameters
    ----------
    model
        Every `_BatchNorm` in it that has running statistics, in any mode.
    process_group
        The ranks that are to agree, anything that `multibn.as_communicator` takes. Default: those
        of a DistributedDataParallel in the model; else the largest group of its synchronized
        layers, or torch's default process group if that is larger.
    how
        `"broadcast"`: rank 0's, its counter `num_batches_tracked` included. `"pool"`: those of the
        ranks' data together if all had equally much: the mean of the means, and by the law of total
        variance the mean of the variances plus the variance of the means (biased, divided by the
        number of ranks); counters stay.

    Raises
    ------
    ValueError
        If `how` is neither. If `process_group` is None and a launcher started several processes,
        but neither the model's layers nor torch.distributed tell of any other than this one.
    """
    check_choice("how", how, How)
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    means = [m.running_mean for m in layers if m.running_mean is not None]
    variances = [m.running_var for m in layers if m.running_var is not None]
    counters = [m.num_batches_tracked for m in layers if m.num_batches_tracked is not None]
    if not means:
        return
    communicator = participants(model, process_group)
    if how == "broadcast":
        buffers = [*means, *variances, *counters]
        packed = _pack(buffers)
        # Rank 0's plus zeros; not plus zero times the others', which may be NaN.
        mine = packed if communicator.rank == 0 else torch.zeros_like(packed)
        _unpack(communicator.allreduce(mine), buffers)
        return
    mean, var = _pack(means), _pack(variances)
    mean, meansqr = communicator.allreduce(torch.stack([mean, var + mean**2])) / communicator.size
    _unpack(torch.cat([mean, (meansqr - mean**2).clamp(min=0)]), [*means, *variances])


def _pack(buffers: Sequence[Tensor]) -> Tensor:
    """All values in one float64 vector."""
    wide = [as_wide(b).flatten() for b in buffers]
    return torch.cat([w.to(wide[0].device) for w in wide])


def _unpack(packed: Tensor, buffers: Sequence[Tensor]) -> None:
    for buffer, part in zip(buffers, packed.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))
