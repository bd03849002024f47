"""Converted layers of classes with a forward pass of their own."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import require

require.need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from multibn.torch_backend import (  # noqa: E402
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from tests.helpers.ranks import CountingCommunicator, run_ranks  # noqa: E402


class Activated(nn.BatchNorm2d):
    """Calls batch norm of its base class."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(input))


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


class Primitive(Activated):
    """Calls the operator below, with numbers of its own, and does not count."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tracks = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracks else (None, None)
        training = self.training or self.running_mean is None
        weight = torch.full((self.num_features,), 2.0, dtype=input.dtype)
        y = torch.batch_norm(input, weight, self.bias, mean, var, training, 0.5, 1e-2, False)
        return self.act(y)


class Frozen(nn.BatchNorm2d):
    """Overrides another method than forward."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class ByItself(nn.BatchNorm2d):
    """Computes statistics by itself, as detectron2's NaiveSyncBatchNorm in training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        return input - input.mean((0, 2, 3), keepdim=True)


def patched(num_features: int, **options: Any) -> nn.Module:
    """The forward pass is set on the instance, as accelerate's hooks do."""
    layer: Any = nn.BatchNorm2d(num_features, **options)
    layer.forward = functools.partial(_after, layer.forward)
    return layer


def _after(forward: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor) -> torch.Tensor:
    return forward(input).tanh()


class Split(nn.BatchNorm2d):
    """Splits of the batch as channels, as lightly's SplitBatchNorm."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        for name in ("running_mean", "running_var"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).repeat(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        n, c, h, w = input.shape
        weight, bias = (None if p is None else p.repeat(2) for p in (self.weight, self.bias))
        statistics: list[Any] = [self.running_mean, self.running_var]
        if not self.training and self.track_running_stats:
            statistics = [s[:c] for s in statistics]
            mean, var = statistics
            return F.batch_norm(input, mean, var, self.weight, self.bias, eps=self.eps)
        x = input.view(-1, 2 * c, h, w)
        factor = 0.1 if self.momentum is None else self.momentum
        mean, var = statistics
        y = F.batch_norm(x, mean, var, weight, bias, True, factor, self.eps)
        return y.view(n, c, h, w)


KINDS: list[Callable[..., Any]] = [Activated, Copied, Primitive, patched]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]


def _input(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 5, 5, generator=generator, dtype=torch.float64)


def _layer(kind: Any, **options: Any) -> Any:
    return kind(3, dtype=torch.float64, **options)


def _run(model: Any, batches: list[torch.Tensor], weight: float = 1.0) -> list[Any]:
    """Training steps, and an evaluation. Gradients of parameters are multiplied by `weight`."""
    results: list[Any] = []
    for x in batches:
        model.zero_grad()
        x = x.clone().requires_grad_()
        y = model.train()(x)
        y.pow(3).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results += [y, x.grad, *(g * weight for g in gradients)]
    return [*results, model.eval()(_input(2, 9)), model.state_dict()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_alone_it_is_the_original(kind: Any, options: dict[str, Any]) -> None:
    layer = _layer(kind, **options)
    batches = [_input(4, seed) for seed in range(3)]
    expected = _run(copy.deepcopy(layer), batches)
    convert_sync_batchnorm(layer, strict=True)
    assert isinstance(layer, SyncBatchNorm)
    assert isinstance(layer, kind if isinstance(kind, type) else nn.BatchNorm2d)
    torch.testing.assert_close(_run(layer, batches), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_one_process_on_the_whole_batch(kind: Any, options: dict[str, Any]) -> None:
    """Uneven batches, one of them empty, and a step in which all are."""
    sizes = [(2, 0, 3), (1, 4, 2), (0, 0, 0), (2, 2, 2)]
    batches = [[_input(n, rank) for rank, n in enumerate(step)] for step in sizes]
    layer = _layer(kind, **options)
    whole = copy.deepcopy(layer)
    expected = [_run(whole, [torch.cat(step)]) for step in batches if len(torch.cat(step))]

    def train(communicator: Any) -> list[Any]:
        mine = convert_sync_batchnorm(copy.deepcopy(layer), communicator)
        return [_run(mine, [step[communicator.rank]]) for step in batches]

    ranks = run_ranks(3, train)
    assert all(not torch.cat([r[2][k].flatten() for r in ranks]).isnan().any() for k in (0, 1))
    for k, step in enumerate((0, 1, 3)):
        y, dx, *gradients, evaluated, state = expected[k]
        for part, values in ((0, y), (1, dx)):
            got = torch.cat([r[step][part] for r in ranks])
            torch.testing.assert_close(got, values, rtol=1e-9, atol=1e-9)
        for g, gradient in enumerate(gradients):
            got = torch.stack([r[step][2 + g] for r in ranks]).sum(0)
            torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-9)
        for results in ranks:
            torch.testing.assert_close(results[step][-2:], [evaluated, state], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("track", [True, False])
def test_a_class_may_call_with_other_channels(track: bool) -> None:
    batches = [[_input(n, rank) for rank, n in enumerate(sizes)] for sizes in [(4, 2), (0, 6)]]
    layer = _layer(Split, track_running_stats=track)
    expected = _run(copy.deepcopy(layer), [torch.cat(parts) for parts in batches])

    def train(communicator: Any) -> list[Any]:
        mine = convert_sync_batchnorm(copy.deepcopy(layer), communicator)
        return _run(mine, [parts[communicator.rank] for parts in batches])

    ranks = run_ranks(2, train)
    for step in range(2):
        joins: list[Any] = [torch.cat, torch.cat, sum, sum]
        for k, join in enumerate(joins):
            got = join([r[4 * step + k] for r in ranks])
            torch.testing.assert_close(got, expected[4 * step + k], rtol=1e-9, atol=1e-9)
    for results in ranks:
        torch.testing.assert_close(results[-1], expected[-1], rtol=1e-9, atol=1e-9)
    wrong = convert_sync_batchnorm(_layer(Split))
    with pytest.raises(ValueError, match=r"must have 6 channels in dimension 1.* got 8 in"):
        wrong(torch.zeros(2, 4, 5, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_pickles_and_revert_keep_the_class(kind: Any) -> None:
    layer = _layer(kind)
    names = set(vars(layer))
    model = convert_sync_batchnorm(nn.Sequential(layer), weighting="rank")
    with_hook: list[str] = []
    layer.register_forward_hook(lambda *_: with_hook.append("called"))
    layer(_input(4))
    assert with_hook == ["called"]
    layer._forward_hooks.clear()
    expected = _run(copy.deepcopy(model), [_input(4)])
    copied = copy.deepcopy(model)
    for other in (copied, pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is type(layer)
        assert other[0] is not layer
        assert other[0].weighting == "rank"
        torch.testing.assert_close(_run(other, [_input(4)]), expected)
    assert vars(revert_sync_batchnorm(copied)[0]).keys() == names
    assert type(copied[0]) is (kind if isinstance(kind, type) else nn.BatchNorm2d)
    torch.testing.assert_close(_run(copied, [_input(4)])[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_is_one_message_each_way(kind: Any) -> None:
    def count(communicator: Any) -> list[list[int]]:
        counting = CountingCommunicator(communicator)
        layer = convert_sync_batchnorm(_layer(kind), counting)
        layer(_input(4))
        counts = [counting.take()]
        layer(_input(4).requires_grad_()).sum().backward()
        counts.append(counting.take())
        layer.eval()(_input(4))
        return [*counts, counting.take()]

    size = 2 * 3 + 4
    for first, training, evaluation in run_ranks(2, count):
        assert len(first) >= 1
        assert (training, evaluation) == ([size, size], [])


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


def test_a_wrong_dimension_on_one_rank_is_heard_on_all() -> None:
    def work(world: Any) -> str:
        layer = convert_sync_batchnorm(nn.Sequential(Activated(3)), world)
        try:
            layer(torch.randn(4, 3) if world.rank else torch.randn(4, 3, 2, 2))
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    heard, refused = run_ranks(2, work)
    assert "the input of 0 was refused on rank(s) [1] of 2" in heard.replace("layer 0", "0")
    assert refused == "expected 4D input (got 2D input)"
