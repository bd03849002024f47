"""A step of a network like ResNet-50, with synchronized and with local batch norms."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.layer import layouts, memory_format
from benchmarks.worker import Measured
from multibn import Communicator
from multibn.check.network import resnet50
from multibn.check.timing import Seconds, Step, take_turns
from multibn.torch_backend import convert_sync_batchnorm


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
        local: Any = resnet50(blocks).to(memory_format=form)  # type: ignore[call-overload]
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
