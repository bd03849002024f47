"""A small ResNet (He et al., 2016, arXiv:1512.03385) for 8x8 images, in torch.

ELU replaces ReLU, so that float32 runs can be compared over hundreds of steps. If the input of a
ReLU is nearly 0, rounding decides the slope, and a difference of 1e-7 between losses grows to 0.1.
The slope of ELU is continuous, and the difference stays at 1e-6.
"""

import torch
from common import initial_weight
from torch import Tensor, nn
from torch.nn import functional as F


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv(1, 16, 3)
        self.norm = _norm(16)
        self.blocks = nn.Sequential(_Block(16, 16), _Block(16, 32, 2), _Block(32, 64, 2))
        self.fc = nn.Linear(64, 10)
        for name, layer in self.named_modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                with torch.no_grad():
                    layer.weight.copy_(torch.from_numpy(initial_weight(name, layer.weight.shape)))
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.norm(self.conv(x)))
        x = self.blocks(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels, 3, stride)
        self.norm1 = _norm(out_channels)
        self.conv2 = _conv(out_channels, out_channels, 3)
        self.norm2 = _norm(out_channels)
        self.shortcut = nn.Sequential()  # the identity, unless the shape changes
        if in_channels != out_channels:
            self.shortcut.append(_conv(in_channels, out_channels, 1, stride))
            self.shortcut.append(_norm(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.elu(y + self.shortcut(x))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def _conv(in_channels: int, out_channels: int, ksize: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, ksize, stride, padding=ksize // 2, bias=False)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1)
