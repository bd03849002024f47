"""A step of a network like ResNet-50, with synchronized and with local batch norms."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.layer import layouts, memory_format
from benchmarks.timing import Measured, Seconds, Step, take_turns
from multibn import Communicator
from multibn.torch_backend import convert_sync_batchnorm

BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if num_in != 4 * width:
            self.shortcut.append(nn.Conv2d(num_in, 4 * width, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def network(blocks: Sequence[int] = BLOCKS, width: int = 64) -> nn.Sequential:
    """The layers of ResNet-50, in its order, with weights drawn from the default generator."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    num_in = width
    for stage, depth in enumerate(blocks):
        for i in range(depth):
            layers.append(Bottleneck(num_in, width << stage, 2 if stage and not i else 1))
            num_in = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))


class _Wait(torch.autograd.Function):
    """The input and its gradient, once all ranks are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        communicator.allreduce(np.zeros(1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.communicator.allreduce(np.zeros(1))
        return dy, None


def waiting(model: nn.Module, communicator: Communicator) -> nn.Module:
    """`model` with batch norms that stay local, but wait for the other ranks, both ways."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, xs: _Wait.apply(xs[0], communicator))
    return model


def measure(
    communicator: Communicator, blocks: Sequence[int], batch: Sequence[int], seconds: float
) -> Measured:
    """Times of forward, loss and backward by "layout/name"; each rank has a `batch` of images.

    A local network does not wait for the slower rank, a synchronized one does at every layer. The
    network "waiting" is local and waits, so that the price of waiting shows by itself.
    """
    times: dict[str, Seconds] = {}
    for layout in layouts(batch):
        form = memory_format(layout, len(batch))
        torch.manual_seed(0)
        local: Any = network(blocks).to(memory_format=form)  # type: ignore[call-overload]
        synchronized = convert_sync_batchnorm(copy.deepcopy(local), communicator)
        x = torch.randn(*batch).to(memory_format=form)
        labels = torch.arange(len(x))

        def step(model: nn.Module, x: Tensor = x, labels: Tensor = labels) -> Step:
            def run() -> None:
                model.zero_grad()
                F.cross_entropy(model(x), labels).backward()

            return run

        models = {
            "synchronized": synchronized, "local": local,
            "waiting": waiting(copy.deepcopy(local), communicator),
        }  # fmt: skip
        steps = {name: step(model) for name, model in models.items()}
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{layout}/{name}": t for name, t in taken.items()}
    num_layers = sum(isinstance(m, nn.BatchNorm2d) for m in local.modules())
    return times, {"num_batch_norms": num_layers, "shape": list(batch)}
