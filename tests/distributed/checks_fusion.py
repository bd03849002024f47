"""`fuse_batch_norm_relu` over ranks: the numbers of one process without it, on the whole batch."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from multibn.communicators import Communicator
from multibn.torch_backend import (
    checkpoint_contexts,
    convert_sync_batchnorm,
    fuse_batch_norm_relu,
)

C = 4
SPLITS = ((5, 2), (7, 0))  # samples of each rank
FUSED = ["blocks.0.bn", "blocks.0.out.1", "blocks.1.bn", "blocks.1.out.1", "stem.1"]


class _Block(nn.Module):
    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C)
        self.relu, self.shortcut = nn.ReLU(inplace=True), shortcut
        self.out = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C))

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.relu(self.bn(self.conv(x))))
        y += self.shortcut(x)
        return self.relu(y)


class _Net(nn.Module):
    checkpoints = False

    def __init__(self, uses_spare: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.ReLU())
        shortcut = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C))
        self.blocks = nn.ModuleList([_Block(shortcut), _Block(nn.Identity())])
        self.spare, self.uses_spare = nn.Parameter(torch.ones(1)), uses_spare
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)
            else:
                x = block(x)
        return F.relu(x * self.spare) if self.uses_spare else x


def _train(net: Any, batches: Tensor, share: slice, scale: float, steps: int) -> Any:
    """Gradients and states after each step, of which there is one or one for each batch."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    targets = torch.randn(len(batches[0]), C, 4, 4, generator=torch.Generator().manual_seed(2))
    results = []
    for number, batch in enumerate(batches, 1):
        goes_on = number < len(batches) and steps == 1
        with net.no_sync() if goes_on and hasattr(net, "no_sync") else nullcontext():
            (scale * net(batch[share]) * targets[share]).sum().backward()
        if not goes_on:
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            results.append([t.clone() for t in (*grads, *net.state_dict().values())])
            optimizer.step()
            optimizer.zero_grad()
    return results


def _check(world: Communicator, steps: int = 2, hook: str = "", **options: Any) -> None:
    checkpoints = options.pop("checkpoints", False)
    alone = _Net(uses_spare=not options.get("find_unused_parameters", False))
    batches = torch.randn(2, 7, 3, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    pairs = []
    for sizes in SPLITS:
        net = convert_sync_batchnorm(copy.deepcopy(alone), world)
        assert sorted(fuse_batch_norm_relu(net).fused) == FUSED
        net.checkpoints = checkpoints
        if hook and world.rank == 0:
            net.get_submodule(hook).register_forward_hook(lambda *_: None)
        start = sum(sizes[: world.rank])
        share = slice(start, start + sizes[world.rank])
        # The gradient is that of the sum over all samples; DistributedDataParallel takes the mean.
        ddp = DistributedDataParallel(net, **options)
        actual = _train(ddp, batches, share, float(world.size), steps)
        expected = _train(copy.deepcopy(alone), batches, slice(None), 1.0, steps)
        pairs.append((actual, expected))
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def check_fused_under_ddp(world: Communicator) -> None:
    _check(world)


def check_fused_with_unused_parameters(world: Communicator) -> None:
    _check(world, find_unused_parameters=True)


def check_fused_with_a_static_graph(world: Communicator) -> None:
    _check(world, static_graph=True)


def check_fused_in_checkpoints(world: Communicator) -> None:
    _check(world, checkpoints=True)


def check_fused_without_sync(world: Communicator) -> None:
    """Gradients of two batches."""
    _check(world, steps=1)


def check_hooks_on_one_rank_of_a_fused_model(world: Communicator) -> None:
    """The other rank's passes stay fused, and the messages are in the same order."""
    for hook in ("blocks.0.out.1", "blocks.0.relu"):
        _check(world, hook=hook)
