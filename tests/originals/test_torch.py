"""torch's batch norms and what torch's users call around them."""

from typing import Any

import numpy as np
import pytest

from tests.helpers import reference, require
from tests.helpers.runs import Run, assert_passed, on_ranks

require.need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from multibn.torch_backend import SyncBatchNorm, sync_batch_norm  # noqa: E402


@on_ranks(__package__, [Run("checks_torch", ("torchrun",), (2,), ("torch",))])
def test_on_ranks(needs: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    assert_passed(needs, request)


def test_the_class_method_of_torchs_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    converted = SyncBatchNorm.convert_sync_batchnorm(model, None)
    assert isinstance(converted[1], SyncBatchNorm)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model, None)[1].weight is converted[1].weight


@pytest.mark.parametrize("eps", [-5.0, -0.5, 0.0, float("nan"), float("inf")])
def test_eps_that_is_not_positive(eps: float) -> None:
    """Nothing but eps keeps a constant channel finite."""
    x = torch.ones(4, 3)
    for call in (
        lambda: SyncBatchNorm(3, eps=eps),
        lambda: sync_batch_norm(x, eps=eps),
        lambda: SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, eps=eps))(x),
    ):
        with pytest.raises(ValueError, match=f"`eps` must be positive and finite: got {eps}"):
            call()
    with pytest.raises(TypeError, match="`eps` must be a number: got 'small' of type str"):
        SyncBatchNorm(3, eps="small")  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_another_length(name: str, length: int) -> None:
    """Also one element, which arithmetic would broadcast."""
    layer = SyncBatchNorm(3)
    setattr(layer, name, nn.Parameter(torch.ones(length)))
    message = rf"`{name}` must have shape \(3,\), a number for each channel.*got \({length},\)"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=f"{name} should contain 3 elements not {length}"):
        layer.eval()(torch.randn(4, 3))  # torch's own check
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 3).half())  # dtypes that torch's own does not take
    arguments = [torch.ones(length if name == n else 3) for n in ("weight", "bias")]
    with pytest.raises(ValueError, match=rf"\(C,\): got \[\({length if name == 'weight' else 3},"):
        sync_batch_norm(torch.randn(4, 3), *arguments)


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dy_format", FORMATS)
@pytest.mark.parametrize("x_format", FORMATS)
def test_gradients_in_another_layout_than_the_input(
    x_format: torch.memory_format, dy_format: torch.memory_format, dtype: torch.dtype
) -> None:
    """Rounded once. torch's own gets most of a float16 dx wrong on CPU if the layouts differ."""
    generator = torch.Generator().manual_seed(0)
    data, dy = torch.randn(2, 8, 3, 20, 20, generator=generator).to(dtype)
    x = data.clone().to(memory_format=x_format).requires_grad_()
    dy = dy.to(memory_format=dy_format)
    layer: Any = SyncBatchNorm(3)
    nn.init.uniform_(layer.weight, 0.5, 2)
    y = layer(x)
    y.backward(dy)
    w, b = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    expected = reference.batch_norm(
        [data.double().numpy()], [dy.double().numpy()], w, b, eps=layer.eps
    )
    assert y.is_contiguous(memory_format=x_format)
    assert x.grad is not None
    ulp = torch.finfo(dtype).eps
    for got, exact in ((y, expected.y[0]), (x.grad, expected.dx[0])):
        # Half an ulp, and the rounding of float32 arithmetic.
        bound = (0.5 * ulp + 4e-7) * np.maximum(np.abs(exact), 2**-10) + 2e-6
        assert (np.abs(got.detach().double().numpy() - exact) <= bound).all()
    np.testing.assert_allclose(layer.weight.grad, expected.dweight, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(layer.bias.grad, expected.dbias, rtol=1e-5, atol=1e-4)
