"""The torch models that `multibn check` times: a layer, and a ResNet-50 without torchvision."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multibn.check.timing import Step, training_step
from multibn.communicators import Communicator
from multibn.torch_backend import convert_sync_batchnorm

BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        inner = [*_conv(num_in, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU()]
        self.body = nn.Sequential(*inner, *_conv(width, 4 * width, 1))
        has_conv = num_in != 4 * width
        self.shortcut = nn.Sequential(*_conv(num_in, 4 * width, 1, stride) if has_conv else ())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(num_in: int, num_out: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(num_in, num_out, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(num_out)]


def resnet50(blocks: Sequence[int] = BLOCKS) -> nn.Sequential:
    """Build ResNet-50 with weights from torch's default generator."""
    layers, num_in = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, depth in enumerate(blocks):
        for i in range(depth):
            layers.append(Bottleneck(num_in, 64 << stage, 2 if stage and not i else 1))
            num_in = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))


def training_steps(
    name: str, shape: Sequence[int], communicator: Communicator, *, peer: bool
) -> dict[str, Step]:
    """Return a step of a "layer" or of "ResNet-50" for each norm; `shape` is the input's."""
    local: nn.Module = nn.BatchNorm2d(shape[1]) if name == "layer" else resnet50()
    models = {
        "multibn": convert_sync_batchnorm(copy.deepcopy(local), communicator),
        "nn.BatchNorm2d": local,
    }
    if peer:
        models["nn.SyncBatchNorm"] = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(local))
    x = torch.randn(*shape, requires_grad=True)
    dy = torch.ones_like(local(x))
    return {kind: training_step(model, x, dy) for kind, model in models.items()}
