"""A small model in both frameworks, for `multibn parity --model`."""

from typing import Any

import numpy as np
import torch
from torch import nn

from multibn.chainer_backend import compat

compat.make_importable()

import chainer  # noqa: E402
from chainer import functions as F  # noqa: E402
from chainer import links as L  # noqa: E402


class TorchModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(self.bn(self.conv(x)).relu().mean((2, 3)))
        return y


class ChainerModel(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 4, 3)
            self.bn = L.BatchNormalization(4, eps=1e-5)
            self.fc = L.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.fc(F.mean(F.relu(self.bn(self.conv(x))), axis=(2, 3)))


def pair() -> tuple[TorchModel, ChainerModel, Any]:
    x = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype("float32")
    return TorchModel(), ChainerModel(), x


def shared_pair() -> tuple[nn.Module, chainer.Chain, Any]:
    """The pair as its owners train it, with few elements, so that n / (n - 1) shows the ranks."""
    from multibn.chainer_backend import create_mnbn_model
    from multibn.torch_backend import convert_sync_batchnorm

    torch_model, chainer_model, x = pair()
    shared = create_mnbn_model(chainer_model, None)
    return convert_sync_batchnorm(torch_model), shared, x[:, :, :5, :5]
