"""Converted layers of classes with a forward pass of their own."""

import copy
import io
import pickle
import pkgutil
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from multibn import SingleProcess
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm
from tests.helpers.ranks import run_ranks
from tests.torch_backend.steps import step

NEEDS = "torch"


class Activated(nn.BatchNorm1d):
    """Calls batch norm of its base class."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(input))


class Activated2d(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class Copied(Activated):
    """Calls batch norm itself, after counting, as timm's BatchNormAct2d (layers/norm_act.py)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tracks = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracks else (None, None)
        training = self.training or self.running_mean is None
        y = F.batch_norm(input, mean, var, self.weight, self.bias, training, factor, self.eps)
        return self.act(y)


class OwnNumbers(Activated):
    """Calls batch norm with numbers of its own, and does not count."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tracks = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracks else (None, None)
        training = self.training or self.running_mean is None
        weight = torch.full((self.num_features,), 2.0, dtype=input.dtype)
        y = F.batch_norm(input, mean, var, weight, self.bias, training, 0.5, 1e-2)
        return self.act(y)


class Frozen(nn.BatchNorm1d):
    """Overrides another method than forward."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class ByItself(nn.BatchNorm1d):
    """Computes statistics by itself, as detectron2's NaiveSyncBatchNorm in training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        return input - input.mean((0, 2), keepdim=True)


class OfAField(nn.BatchNorm1d):
    """Normalizes a field of its input, as the norms of sparse convolution libraries."""

    def forward(self, input: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return input | {"features": super().forward(input["features"])}


def test_a_field_of_the_input_is_normalized_over_the_ranks() -> None:
    def rank(world: Any) -> torch.Tensor:
        torch.manual_seed(world.rank)
        points = torch.randn(50 if world.rank == 0 else 3, 2).double()
        layer = convert_sync_batchnorm(OfAField(2, affine=False).double(), world, strict=True)
        y: torch.Tensor = layer({"features": points})["features"]
        return y

    y = torch.cat(run_ranks(2, rank))
    torch.testing.assert_close(y.mean(0), torch.zeros(2).double())
    torch.testing.assert_close(y.var(0, correction=0), torch.ones(2).double(), atol=1e-4, rtol=0)


class Split(nn.BatchNorm1d):
    """Splits of the batch as channels, as lightly's SplitBatchNorm."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        for name in ("running_mean", "running_var"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).repeat(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _, c, length = input.shape
        weight, bias = (None if p is None else p.repeat(2) for p in (self.weight, self.bias))
        statistics: list[Any] = [self.running_mean, self.running_var]
        if not self.training and self.track_running_stats:
            statistics = [s[:c] for s in statistics]
            mean, var = statistics
            return F.batch_norm(input, mean, var, self.weight, self.bias, eps=self.eps)
        x = input.view(-1, 2 * c, length)
        factor = 0.1 if self.momentum is None else self.momentum
        mean, var = statistics
        y = F.batch_norm(x, mean, var, weight, bias, True, factor, self.eps)
        return y.view(input.shape)


KINDS: list[type[nn.BatchNorm1d]] = [OwnNumbers, Split]  # besides those of test_every_layer.py
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]


def _input(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 5, generator=generator, dtype=torch.float64)


def _layer(kind: Any, **options: Any) -> Any:
    return kind(3, dtype=torch.float64, **options)


@pytest.mark.parametrize("sizes", [(2, 0, 4), (4,)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_original_on_the_whole_batch(kind: Any, options: Any, sizes: Any) -> None:
    """Outputs, gradients and state, over ranks and alone; a step without any batch changes none."""
    original = _layer(kind, **options)
    steps = [[_input(n, 3 * k + r) for r, n in enumerate(sizes)] for k in range(3)]

    def train(layer: Any, xs: list[torch.Tensor]) -> list[Any]:
        results: list[Any] = []
        for x in xs:
            results += [t for t in step(layer.train(), x, 2 + x.sin()) if t is not None]
        return [*results, layer.eval()(_input(2, 9)).detach(), *layer.state_dict().values()]

    def on_rank(communicator: Any) -> list[Any]:
        layer = convert_sync_batchnorm(copy.deepcopy(original), communicator, strict=True)
        assert isinstance(layer, SyncBatchNorm)
        assert isinstance(layer, kind)
        assert not layer(_input(0)).numel()
        return train(layer, [xs[communicator.rank] for xs in steps])

    ranks = run_ranks(len(sizes), on_rank)
    expected = train(original, [torch.cat(xs) for xs in steps])
    for k, want in enumerate(expected):
        got: Any = [r[k] for r in ranks]
        if want.shape[1:] == (3, 5) and len(want) == sum(sizes):
            got = [torch.cat(got)]
        elif k < len(expected) - len(original.state_dict()) - 1:
            got = [sum(got)]
        for each in got:
            torch.testing.assert_close(each, want, rtol=1e-9, atol=1e-9)


def test_calls_with_other_channels_are_checked() -> None:
    with pytest.raises(ValueError, match=r"must have 6 channels in dimension 1.* got 8 in"):
        convert_sync_batchnorm(_layer(Split))(torch.zeros(2, 4, 5))


def test_other_overrides_stay() -> None:
    layer = convert_sync_batchnorm(_layer(Frozen), strict=True)
    assert type(layer).forward is SyncBatchNorm.forward
    assert not layer.train().training
    assert isinstance(copy.deepcopy(layer), Frozen)


def test_statistics_that_are_not_torchs_are_refused() -> None:
    model = convert_sync_batchnorm(nn.Sequential(_layer(ByItself)), strict=True)
    message = r"`0`, a ByItself, cannot share statistics.*did not call torch.nn.functional.batch_n"
    with pytest.raises(RuntimeError, match=message):
        model(_input(4))
    assert not model[0].num_batches_tracked
    model.eval()(_input(4))


class Sometimes(nn.BatchNorm1d):
    """Normalizes large batches itself, as a batch renormalization does after its warm-up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if 0 < len(x) < 8 else x - x.mean(0) if len(x) else x


def test_a_later_pass_of_its_own_by_statistics_of_one_rank_is_refused() -> None:
    def train(communicator: Any) -> str:
        layer = convert_sync_batchnorm(Sometimes(3), communicator)
        layer(torch.randn(4, 3))
        layer(torch.randn(0, 3))  # on all ranks
        with pytest.raises(RuntimeError, match="cannot share statistics: its forward") as error:
            layer(torch.randn(8, 3))
        return str(error.value)

    assert all("a Sometimes" in said for said in run_ranks(2, train))
    alone: Any = convert_sync_batchnorm(Sometimes(3), SingleProcess())
    alone(torch.randn(4, 3))
    alone(torch.randn(8, 3))


class WithoutEps(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, training=self.training)


def test_what_a_class_leaves_out_has_torchs_defaults() -> None:
    layer, x = convert_sync_batchnorm(WithoutEps(3)), _input(4).float()
    torch.testing.assert_close(layer(x), WithoutEps(3)(x))


class Locked(nn.BatchNorm1d):
    """Holds what cannot be copied, and makes another one in the copy."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


def test_a_class_keeps_what_it_says_of_its_copies() -> None:
    layer = convert_sync_batchnorm(Locked(3))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.lock is not layer.lock
        torch.testing.assert_close(other(_input(4)), layer(_input(4)))


class Named(nn.BatchNorm1d):
    """Has no forward pass of its own."""


def test_a_whole_model_loads_as_weights_only_by_the_names_that_torch_reports() -> None:
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), Activated(3), Named(3)))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    allowed: list[Any] = [pkgutil.resolve_name(name) for name in names]
    file.seek(0)
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(file, weights_only=True)
    assert list(map(type, loaded)) == list(map(type, model))
    torch.testing.assert_close(loaded(_input(4)), model(_input(4)))
