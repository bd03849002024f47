"""One layer's step on GPUs, over NCCL, beside nn.SyncBatchNorm.

With one GPU there is one rank, where nn.SyncBatchNorm would fall back to the local batch norm. So
the peer calls nn.SyncBatchNorm's autograd function, as nn.SyncBatchNorm does on several ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layer import OURS, in_pairs, key, layouts
from benchmarks.timing import Seconds, Step
from multibn import Communicator
from multibn.torch_backend import SyncBatchNorm

PEER = "nn.SyncBatchNorm"


class _AlwaysSynchronized(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        from torch.nn.modules._functions import SyncBatchNorm as Function

        group = dist.group.WORLD
        y: Tensor = Function.apply(
            input, self.weight, self.bias, self.running_mean, self.running_var,
            self.eps, self.momentum, group, dist.get_world_size(),
        )  # fmt: skip
        return y


def measure(
    communicator: Communicator, shapes: Sequence[Sequence[int]], seconds: float
) -> tuple[dict[str, Seconds], dict[str, Any]]:
    """Times under `layer.key(shape, layout, name)`; the notes hold the device's name."""
    times: dict[str, Seconds] = {}
    device = torch.device("cuda", torch.cuda.current_device())
    for shape in shapes:
        for layout in layouts(shape):
            memory_format = torch.contiguous_format
            if layout == "channels_last":
                memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            x = torch.randn(*shape, device=device).to(memory_format=memory_format)
            dy = torch.randn(*shape, device=device).to(memory_format=memory_format)
            steps = {
                OURS: _step(SyncBatchNorm(shape[1], device=device), x.requires_grad_(), dy),
                PEER: _step(_AlwaysSynchronized(shape[1], device=device), x, dy),
            }
            taken = in_pairs(steps, communicator, seconds=seconds)
            times |= {key(shape, layout, name): t for name, t in taken.items()}
    return times, {"device": torch.cuda.get_device_name(device)}


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> Step:
    def run() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)
        torch.cuda.synchronize()

    return run
