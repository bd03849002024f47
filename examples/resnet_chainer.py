"""The ResNet of resnet_torch.py in Chainer: the same layers under the same names."""

from typing import Any

import multibn.chainer  # noqa: F401  before Chainer: makes it importable on today's NumPy

# isort: split
import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L
from common import initial_weight


class ResNet(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = _conv(1, 16, 3)
            self.norm = _norm(16)
            self.blocks = chainer.ChainList(_Block(16, 16), _Block(16, 32, 2), _Block(32, 64, 2))
            self.fc = L.Linear(64, 10)
        for path, layer in self.namedlinks(skipself=True):
            if isinstance(layer, (L.Convolution2D, L.Linear)):
                layer.W.array[...] = initial_weight(path[1:].replace("/", "."), layer.W.shape)

    def forward(self, x: Any) -> chainer.Variable:
        x = F.elu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.fc(F.mean(x, axis=(2, 3)))


class _Block(chainer.Chain):
    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = _conv(in_channels, out_channels, 3, stride)
            self.norm1 = _norm(out_channels)
            self.conv2 = _conv(out_channels, out_channels, 3)
            self.norm2 = _norm(out_channels)
            self.shortcut = chainer.ChainList()  # the identity, unless the shape changes
            if in_channels != out_channels:
                self.shortcut.append(_conv(in_channels, out_channels, 1, stride))
                self.shortcut.append(_norm(out_channels))

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        y = F.elu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        for layer in self.shortcut:
            x = layer(x)
        return F.elu(y + x)


def accuracy(model: chainer.Link, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        return float(np.mean(model(x).array.argmax(1) == y))


def _conv(in_channels: int, out_channels: int, ksize: int, stride: int = 1) -> L.Convolution2D:
    return L.Convolution2D(in_channels, out_channels, ksize, stride, pad=ksize // 2, nobias=True)


def _norm(channels: int) -> L.BatchNormalization:
    # torch's default values: Chainer's eps is 2e-5 by default; decay is 1 - torch's momentum.
    return L.BatchNormalization(channels, decay=0.9, eps=1e-5)
