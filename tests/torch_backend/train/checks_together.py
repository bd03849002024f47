"""Layers normalized together on real processes: the numbers of the same layers one by one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multibn import SingleProcess
from multibn.communicators import Communicator
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch_backend import (
    SyncBatchNorm,
    average_gradients,
    checkpoint_contexts,
    convert_sync_batchnorm,
    normalize_together,
)
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator
from tests.torch_backend.train.test_together import one_by_one, train

RUNS = on("torchrun mpiexec", 3, needs="torch")


SIZES = (3, 0, 5)  # of the ranks' batches
CHANNELS = (3, 2, 4)
MESSAGE = sum(2 * c + 2 for c in CHANNELS) + 2


def _layers(world: Communicator, **options: Any) -> Any:
    torch.manual_seed(0)
    layers: Any = nn.ModuleList(
        SyncBatchNorm(c, dtype=torch.float64, process_group=world, **options) for c in CHANNELS
    )
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    layers[1].fuse_relu = True
    return layers


def _inputs(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(SIZES[rank], c, *spatial) for c, spatial in zip(CHANNELS, [(2, 2), (), (3,)])]  # noqa: B905
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def _checkpointed(layers: Any, xs: Any) -> Any:
    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return normalize_together(layers, xs)

    return checkpoint(run, *xs, use_reentrant=False, context_fn=checkpoint_contexts)


def check_one_message_gives_the_numbers_of_layers_apart(world: Communicator) -> None:
    """Of an uneven batch, a rank without any, in each weighting; also in a checkpointed block."""
    for weighting in ("element", "sample", "rank"):
        results, messages = [], []
        for normalize in (one_by_one, normalize_together, _checkpointed):
            counting = CountingCommunicator(world)
            layers = _layers(counting, weighting=weighting)
            results.append(train(normalize, layers, _inputs(world.rank)))
            messages.append(counting.take())
        assert len(messages[0]) == 6
        assert messages[1:] == [[MESSAGE] * 2] * 2
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def check_frozen_layers_do_not_communicate(world: Communicator) -> None:
    results, messages = [], []
    for normalize in (one_by_one, normalize_together):
        counting = CountingCommunicator(world)
        layers = _layers(counting)
        layers[1].eval()
        results.append(train(normalize, layers, _inputs(world.rank)))
        messages.append(counting.take())
        train(normalize, layers.eval(), _inputs(world.rank))
        assert counting.take() == []
    assert messages[1] == [MESSAGE - 2 * 2 - 2] * 2
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def check_bad_input_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    for frozen in (None, 1):
        layers = _layers(world)
        if frozen is not None:
            layers[frozen].eval()
        for position in range(3):
            for culprit in (0, world.size - 1):
                xs = _inputs(world.rank)
                if world.rank == culprit:
                    xs[position] = torch.ones(2, 7)
                    with pytest.raises(ValueError, match=r"must have \d channels.*got 7"):
                        normalize_together(layers, xs)
                    continue
                with pytest.raises(RuntimeError, match=rf"refused on rank\(s\) \[{culprit}\] of"):
                    normalize_together(layers, xs)
        normalize_together(layers, _inputs(world.rank))  # and the layers still work


class _Block(nn.Module):
    """A residual block whose last batch norm and shortcut's are normalized together."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together
        self.conv, self.shortcut = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.bn, self.shortcut_bn = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalize: Any = normalize_together if self.together else one_by_one
        y, z = normalize([self.bn, self.shortcut_bn], [self.conv(x), self.shortcut(x)])
        y += z
        return nn.functional.relu(y, inplace=True)


def _block(together: bool) -> Any:
    torch.manual_seed(0)
    return _Block(together).double()


def _block_input(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)


def check_a_block_trains_as_on_one_process(world: Communicator) -> None:
    """In DistributedDataParallel where there is one, against the whole batch in one process."""
    whole, block = _block(False), convert_sync_batchnorm(_block(True), world)
    ddp = isinstance(world, TorchDistributed)
    model = nn.parallel.DistributedDataParallel(block) if ddp else block
    xs = [_block_input(rank) for rank in range(world.size)]
    for net, x in ((model, xs[world.rank]), (whole, torch.cat(xs))):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            if net is block:
                average_gradients(block.parameters(), world)
            optimizer.step()
    torch.testing.assert_close(block.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-11)


def check_errors_name_all_layers(world: Communicator) -> None:
    """By what they have in common and their own parts of the name."""
    model = nn.Sequential(convert_sync_batchnorm(_block(True), world))
    x = _block_input(world.rank)
    x[0] = torch.inf if world.rank == 1 else 0
    with pytest.raises(
        FloatingPointError, match=r"of layer 0\.\[bn, shortcut_bn\] are not finite.*rank\(s\) \[1\]"
    ):
        model(x)
    copied: Any = copy.deepcopy(model)  # with names and messages of its own
    copied[0].bn.process_group = SingleProcess()
    with pytest.raises(ValueError, match="the same `process_group`: got SingleProcess"):
        copied(x)
