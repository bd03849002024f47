"""Layers normalized together on real processes: the numbers of the same layers one by one."""

import itertools
from typing import Any

import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm, normalize_together
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator
from tests.torch_backend.train.test_together import one_by_one, train

RUNS = on("torchrun mpiexec", 3, needs="torch")


SIZES = (3, 0, 5)  # of the ranks' batches
CHANNELS = (3, 2, 4)
MESSAGE = sum(2 * c + 2 for c in CHANNELS) + 2


def _layers(world: Communicator, **options: Any) -> Any:
    layers: Any = nn.ModuleList(
        SyncBatchNorm(c, dtype=torch.float64, process_group=world, **options) for c in CHANNELS
    )
    for k, parameter in enumerate(layers.parameters()):
        nn.init.constant_(parameter, 1.5 - k)
    layers[1].fuse_relu = True
    return layers


def _inputs(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(SIZES[rank], c, *spatial) for c, spatial in zip(CHANNELS, [(2, 2), (), (3,)])]  # noqa: B905
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def check_one_message_gives_the_numbers_of_layers_apart(world: Communicator) -> None:
    """Of an uneven batch, a rank without any, in each weighting; frozen layers send nothing."""
    for weighting, frozen in itertools.product(("element", "sample", "rank"), (False, True)):
        results, messages = [], []
        for normalize in (one_by_one, normalize_together):
            counting = CountingCommunicator(world)
            layers = _layers(counting, weighting=weighting)
            layers[1].train(not frozen)
            results.append(train(normalize, layers, _inputs(world.rank)))
            messages.append(counting.take())
            train(normalize, layers.eval(), _inputs(world.rank))
            assert counting.take() == []
        assert messages[1] == [MESSAGE - (2 * CHANNELS[1] + 2) * frozen] * 2
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
