"""Where a fused ReLU gives 0, its gradient is 0, as torch's and Chainer's is."""

from typing import Any

import numpy as np
import pytest
import torch

from multibn import SingleProcess, kernels
from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.torch_backend import SyncBatchNorm

import chainer  # isort: skip (multibn makes it importable)

NEEDS = "torch chainer"


def inputs(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An activation, weights and biases, by which many outputs are 0 or rounded to 0."""
    generator = torch.Generator().manual_seed(0)
    C = 64
    ones = torch.ones(C, dtype=torch.float64)
    if kind == "constant":
        return torch.full((8, C, 3), 2.0, dtype=dtype), ones, 0 * ones
    if kind == "rounded":  # the smallest numbers of 16 bits, and half of these
        x = torch.randn(8, C, 3, generator=generator).to(dtype)
        return x, ones * (2.0**-134 if dtype == torch.bfloat16 else 2.0**-25), 0 * ones
    x = (torch.rand(8, C, 3, generator=generator) < 0.3).to(dtype)
    mean, var = x.double().mean((0, 2)), x.double().var((0, 2), correction=0)
    weight = torch.rand(C, generator=generator, dtype=torch.float64) + 0.5
    return x, weight, -weight * (1 - mean) / (var + 1e-5).sqrt()  # 0 for 1, but for rounding


@pytest.mark.parametrize("kind", ["constant", "rounded", "cancelled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_layers_have_no_gradient_where_a_relu_gives_zero(
    kind: str, dtype: torch.dtype, residual: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `y` is 0, `dy` has no part in gradients of first and second order."""
    if not native:
        monkeypatch.setattr(kernels, "select", lambda *_: kernels.reference)
    x, weight, bias = inputs(kind, dtype)
    parameters = torch.promote_types(dtype, torch.float32)
    layer = SyncBatchNorm(64, process_group=SingleProcess(), fuse_relu=True, dtype=parameters)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x.requires_grad_()
    for create_graph in (False, True):
        y = layer(x, *([torch.zeros_like(x)] if residual else []))
        dy = torch.where(y.detach() > 0, 0.0, 1.0).to(dtype)
        assert dy.any()
        grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy, create_graph=create_graph)
        assert not any(g.any() for g in grads)
        (dbias,) = torch.autograd.grad(layer(x), layer.bias, torch.ones_like(x))
        counted = (layer(x) > 0).sum((0, 2))
        np.testing.assert_allclose(dbias.double(), counted, rtol=1e-6)


def test_links_have_no_gradient_where_a_relu_gives_zero() -> None:
    for kind in ("constant", "rounded", "cancelled"):
        for dtype in (torch.float32, torch.float16):
            data, weight, bias = (v.numpy() for v in inputs(kind, dtype))
            link: Any = MultiNodeBatchNormalization(64, None, eps=1e-5, fuse_relu=True)
            link.gamma.array[...], link.beta.array[...] = weight, bias
            for double in (False, True):
                x = chainer.Variable(data)
                y = link(x)
                y.grad = np.where(y.array > 0, 0, 1).astype(data.dtype)
                assert y.grad.any()
                link.cleargrads()
                y.backward(enable_double_backprop=double)
                assert not any(v.grad.any() for v in (x, link.gamma, link.beta))
