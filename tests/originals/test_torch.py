"""torch's batch norms and what torch's users call around them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multibn.parity import oracle
from tests.helpers import require

require.need("torch", "dev")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from multibn.torch_backend import (  # noqa: E402
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    sync_batch_norm,
)
from tests.helpers.fvcore import get_bn_modules, update_bn_stats  # noqa: E402


def test_the_class_method_of_torchs_name_converts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    converted = SyncBatchNorm.convert_sync_batchnorm(model, None)
    assert isinstance(converted[1], SyncBatchNorm)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model, None)[1].weight is converted[1].weight


@pytest.mark.parametrize("eps", [-5.0, -0.5, 0.0, float("nan"), float("inf")])
def test_eps_that_is_not_positive_is_refused(eps: float) -> None:
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
def test_a_parameter_of_another_length_is_refused(name: str, length: int) -> None:
    """Also one element, which arithmetic would broadcast."""
    layer = SyncBatchNorm(3)
    setattr(layer, name, nn.Parameter(torch.ones(length)))
    message = rf"`{name}` must have shape \(3,\), a number for each channel.*got \({length},\)"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=f"{name} should contain 3 elements not {length}"):
        layer.eval()(torch.randn(4, 3))  # torch's own check
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 3).double())  # dtypes that torch's own does not take
    arguments = [torch.ones(length if name == n else 3) for n in ("weight", "bias")]
    with pytest.raises(ValueError, match=rf"\(C,\): got \[\({length if name == 'weight' else 3},"):
        sync_batch_norm(torch.randn(4, 3), *arguments)


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dy_format", FORMATS)
@pytest.mark.parametrize("x_format", FORMATS)
def test_gradients_may_have_another_layout_than_the_input(
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
    expected = oracle.batch_norm(
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


class Net(nn.Module):
    """Named layers of each kind of batch norm, between layers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn1 = nn.BatchNorm2d(4)
        self.bn2 = Activated(4)
        self.pool = nn.Flatten(2)
        self.bn3 = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn3(self.pool(self.bn2(self.bn1(self.conv(x)))))


class Activated(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def ultralytics(model: nn.Module) -> list[str]:
    """Weights that are not decayed: BaseTrainer.build_optimizer (ultralytics/engine/trainer.py)."""
    norms = tuple(value for name, value in vars(nn).items() if "Norm" in name)
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, norms) and "bias" not in name
    ]


def detectron2_weight_decay_norm(model: nn.Module) -> list[str]:
    """Norms with a decay of their own: get_default_optimizer_params (solver/build.py)."""
    norms = (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm),
        nn.LocalResponseNorm,
    )
    return [path for path, module in model.named_modules() if isinstance(module, norms)]


def frozen(model: nn.Module) -> list[str]:
    """Norms that freezing replaces.

    detectron2's FrozenBatchNorm2d.convert_frozen_batchnorm (layers/batch_norm.py), and
    freeze_batch_norm_2d (layers/norm_act.py), which timm's `freeze` calls.
    """
    norms = (nn.modules.batchnorm.BatchNorm2d, nn.modules.batchnorm.SyncBatchNorm)
    return [path for path, module in model.named_modules() if isinstance(module, norms)]


def fvcore(model: nn.Module) -> list[str]:
    """Norms that fvcore's precise batch norm finds, and their statistics after it."""
    layers = {id(module) for module in get_bn_modules(model)}
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, 3, 3, generator=generator).double() for _ in range(3)]
    update_bn_stats(model, batches, 3)
    statistics = {
        name.rpartition(".")[0]: (1 + buffer).float().tolist()  # float: rounded, to be comparable
        for name, buffer in model.named_buffers()
        if "running" in name
    }
    return [
        f"{path}: {statistics[path]}"
        for path, module in model.named_modules()
        if id(module) in layers
    ]


def own_class(model: nn.Module) -> list[str]:
    """Layers of a project's own class."""
    return [path for path, module in model.named_modules() if isinstance(module, Activated)]


def batch_norm_base(model: nn.Module) -> list[str]:
    """Norms of torch's common base class: mmengine, Lightning, torchvision, SWA."""
    norm = nn.modules.batchnorm._BatchNorm
    return [path for path, module in model.named_modules() if isinstance(module, norm)]


@pytest.mark.parametrize(
    "find, count",
    [
        (ultralytics, 3),
        (detectron2_weight_decay_norm, 3),
        (frozen, 2),
        (fvcore, 3),
        (own_class, 1),
        (batch_norm_base, 3),
    ],
)
def test_code_that_looks_for_a_class_finds_what_it_found(
    find: Callable[[nn.Module], list[str]], count: int
) -> None:
    plain = Net().double()
    expected = find(copy.deepcopy(plain))
    assert len(expected) == count
    converted = convert_sync_batchnorm(copy.deepcopy(plain), strict=True)
    assert find(converted) == expected
    loaded = pickle.loads(pickle.dumps(convert_sync_batchnorm(plain)))
    assert find(copy.deepcopy(loaded)) == expected
    assert find(revert_sync_batchnorm(loaded)) == expected
