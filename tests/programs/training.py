"""Trains a model on the ranks, and in one process on the whole batch."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm
from tests.programs.models import Model
from tests.programs.row import PER_RANK, STEPS, Row


def trained(model: Model) -> Row:
    """Train a model in float64. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = prepared(model.build())
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS, size * PER_RANK, *model.shape, generator=generator).double()
    order = torch.arange(size * PER_RANK)
    share = order[rank * PER_RANK : (rank + 1) * PER_RANK]

    # The first rank trains with the samples in order; the others have them in another order.
    alone = _train(copy.deepcopy(network), data, order.roll(3 * rank))
    converted = convert_sync_batchnorm(copy.deepcopy(network), strict=True)
    num_layers = sum(isinstance(m, SyncBatchNorm) for m in converted.modules())
    together = _train(DistributedDataParallel(converted), data, share)
    local = _train(DistributedDataParallel(copy.deepcopy(network)), data, share)
    difference, other, reordered = differences(alone, together, local, alone)
    num_norms = sum(isinstance(m, _BatchNorm) for m in network.modules())
    return Row(
        model.program,
        f"{model.name}, {STEPS} steps",
        f"{num_layers} of {num_norms} layers share",
        difference,
        reordered,
        other,
    ).judge()


def prepared(network: nn.Module) -> nn.Module:
    """The model in float64, for training, without dropout."""
    for part in network.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        if "drop_rate" in vars(part):  # of timm's calls of dropout as a function
            vars(part)["drop_rate"] = 0.0
    return network.double().train()


def differences(alone: Tensor, *states: Tensor) -> list[float]:
    """The largest difference, on any rank, of each state from `alone` of rank 0. Collective."""
    expected = alone.clone()
    dist.broadcast(expected, 0)
    largest = torch.stack([(state - expected).abs().max() for state in states])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def state(network: nn.Module) -> Tensor:
    """All parameters and buffers, one after the other."""
    tensors = [*network.parameters(), *network.buffers()]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def _train(network: nn.Module, data: Tensor, samples: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        _loss(network(batch[samples]), number, len(batch), samples).backward()
        optimizer.step()
    return state(network)


def _loss(outputs: Any, number: int, num_samples: int, samples: Tensor) -> Tensor:
    """Distance of all outputs from random targets; `samples` are those of this forward pass."""
    generator = torch.Generator().manual_seed(number)
    leaves: Sequence[Any] = pytree.tree_leaves(outputs)
    loss = torch.zeros((), dtype=torch.float64)
    for y in leaves:
        if isinstance(y, Tensor) and y.requires_grad:
            targets = torch.randn(num_samples, *y.shape[1:], generator=generator).double()
            loss = loss + (y - targets[samples]).square().mean()
    return loss
