"""The ResNet of resnet_torch.py in flax: the same layers under the same names, channels last."""

from typing import Any

import jax
import jax.numpy as jnp
from common import initial_weight
from flax import nnx


class ResNet(nnx.Module):
    def __init__(self, dtype: Any) -> None:
        self.conv = _conv(1, 16, 3, dtype=dtype)
        self.norm = _norm(16, dtype)
        sizes = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.blocks = nnx.List([_Block(*size, dtype=dtype) for size in sizes])
        self.fc = nnx.Linear(64, 10, param_dtype=dtype, rngs=nnx.Rngs(0))
        for path, layer in nnx.iter_modules(self):
            if isinstance(layer, nnx.Conv | nnx.Linear):
                # torch has (out, in, height, width), flax (height, width, in, out).
                k = layer.kernel.ndim
                to_torch, to_flax = (k - 1, k - 2, *range(k - 2)), (*range(2, k), 1, 0)
                shape = tuple(layer.kernel.shape[i] for i in to_torch)
                weight = initial_weight(".".join(map(str, path)), shape)
                layer.kernel[...] = jnp.asarray(weight.transpose(to_flax), dtype)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.elu(self.norm(self.conv(jnp.moveaxis(x, 1, -1))))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((1, 2)))


class _Block(nnx.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int, dtype: Any) -> None:
        self.conv1 = _conv(in_channels, out_channels, 3, stride, dtype)
        self.norm1 = _norm(out_channels, dtype)
        self.conv2 = _conv(out_channels, out_channels, 3, dtype=dtype)
        self.norm2 = _norm(out_channels, dtype)
        self.shortcut = nnx.List()  # the identity, unless the shape changes
        if in_channels != out_channels:
            self.shortcut.append(_conv(in_channels, out_channels, 1, stride, dtype))
            self.shortcut.append(_norm(out_channels, dtype))

    def __call__(self, x: Any) -> Any:
        y = jax.nn.elu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        for layer in self.shortcut:
            x = layer(x)
        return jax.nn.elu(y + x)


def accuracy(model: nnx.Module, x: Any, y: Any) -> float:
    model.eval()
    return float((nnx.jit(lambda model, x: model(x))(model, x).argmax(1) == y).mean())


def _conv(
    in_channels: int, out_channels: int, size: int, stride: int = 1, dtype: Any = None
) -> Any:
    padding = [(size // 2,) * 2] * 2
    options: Any = {"strides": stride, "padding": padding, "use_bias": False, "param_dtype": dtype}
    return nnx.Conv(in_channels, out_channels, (size, size), **options, rngs=nnx.Rngs(0))


def _norm(channels: int, dtype: Any) -> nnx.BatchNorm:
    return nnx.BatchNorm(channels, epsilon=1e-5, momentum=0.9, param_dtype=dtype, rngs=nnx.Rngs(0))
