"""torch's batch norms and what torch's users call around them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from tests.helpers.fvcore import get_bn_modules, update_bn_stats
from tests.torch_backend.convert.test_class_swap import Activated2d

NEEDS = "torch dev"


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_another_length_is_refused(name: str, length: int) -> None:
    """Also one element, which arithmetic would broadcast."""
    layer = SyncBatchNorm(3)
    setattr(layer, name, nn.Parameter(torch.ones(length)))
    message = rf"`{name}` must have shape \(3,\), a number for each channel.*got \({length},\) and"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 3))
    setattr(layer.train(), name, nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    with pytest.raises(ValueError, match=r"floating-point dtype: got \(3,\) and torch\.complex64"):
        layer(torch.randn(4, 3))
    setattr(layer, name, nn.Parameter(torch.ones(length)))
    with pytest.raises(RuntimeError, match=f"{name} should contain 3 elements not {length}"):
        layer.eval()(torch.randn(4, 3))  # torch's own check
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 3).double())  # dtypes that torch's own does not take


class Net(nn.Module):
    """Named layers of each kind of batch norm, between layers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn1 = nn.BatchNorm2d(4)
        self.bn2 = Activated2d(4)
        self.pool = nn.Flatten(2)
        self.bn3 = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn3(self.pool(self.bn2(self.bn1(self.conv(x)))))


# Every class that code of torch's users looks for; `Activated2d` is a project's own.
NORMS = [value for name, value in vars(nn.modules.batchnorm).items() if "Norm" in name]
NORMS += [value for name, value in vars(nn).items() if "Norm" in name] + [Activated2d]


def found(model: nn.Module) -> list[list[str]]:
    """The paths of each class's instances; and what fvcore finds, with its precise statistics."""
    names = [[path for path, m in model.named_modules() if isinstance(m, cls)] for cls in NORMS]
    layers = {id(module) for module in get_bn_modules(model)}
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, 3, 3, generator=generator).double() for _ in range(3)]
    update_bn_stats(model, batches, 3)
    statistics = [
        f"{name} {(1 + buffer).float().tolist()}"  # rounded, to be comparable
        for name, buffer in model.named_buffers()
        if "running" in name
    ]
    return [*names, [path for path, m in model.named_modules() if id(m) in layers], statistics]


def test_code_that_looks_for_a_class_finds_what_it_found() -> None:
    plain = Net().double()
    expected = found(copy.deepcopy(plain))
    assert ["bn1", "bn2", "bn3"] in expected
    converted = convert_sync_batchnorm(copy.deepcopy(plain), strict=True)
    assert found(converted) == expected
    loaded = pickle.loads(pickle.dumps(convert_sync_batchnorm(plain)))
    assert found(copy.deepcopy(loaded)) == expected
    assert found(revert_sync_batchnorm(loaded)) == expected
