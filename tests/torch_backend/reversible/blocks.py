"""Reversible blocks of perceptrons, and a step of theirs compared with the stored run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from multibn import SingleProcess
from multibn.torch_backend import SyncBatchNorm
from multibn.torch_backend.reversible import ReversibleSequence
from multibn.torch_backend.reversible.sequence import Mode

MODES: tuple[Mode, ...] = ("stored", "reversible")

Pair: TypeAlias = tuple[nn.Module, nn.Module]
Make: TypeAlias = Callable[[], nn.Module]


class Mlp(nn.Module):
    """Perceptron of (B, N, dim), with what a test puts between."""

    def __init__(self, dim: int, *between: nn.Module, out: int | None = None) -> None:
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.between = nn.Sequential(nn.GELU(), *between)
        self.fc2 = nn.Linear(2 * dim, out or dim)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        y: Tensor = self.fc2(self.between(self.fc1(self.norm(x)) + shift))
        return y


class Lambda(nn.Module):
    """A module that returns what a function makes of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def mlps(*between: Make) -> Pair:
    return Mlp(8, *(make() for make in between)), Mlp(8, *(make() for make in between))


dropout = partial(nn.Dropout, 0.4)
# Batch norms of the 6 tokens, which stand where channels do.
foreign = partial(nn.BatchNorm1d, 6)
own = partial(SyncBatchNorm, 6, process_group=SingleProcess())
random = partial(mlps, dropout)


def build(
    mode: Mode,
    pair: Callable[[], Pair] = mlps,
    depth: int = 3,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    blocks = [pair() for _ in range(depth)]
    return ReversibleSequence(blocks, mode=mode, **options).to(dtype)


def inputs(dtype: torch.dtype = torch.float64, dim: int = 8, seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(4, 6, dim, dtype=dtype, generator=generator).requires_grad_() for _ in range(2)
    )


def loss_of(y1: Tensor, y2: Tensor) -> Tensor:
    return y1.square().mean() + y2.pow(3).mean() + (y1 * y2).mean()


class Result(NamedTuple):
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    rng: Tensor


def result(model: nn.Module, xs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Result:
    return Result(
        [y.detach() for y in outputs],
        [t.grad for t in (*xs, *model.parameters())],
        [buffer.clone() for buffer in model.buffers()],
        torch.get_rng_state(),
    )


def step(model: Any, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Outputs of a forward pass, whose backward pass is over."""
    ys = model(*xs)
    loss_of(*ys).backward()
    return ys


def train(model: Any, step: Callable[..., Sequence[Tensor]] = step, *, xs: Any = None) -> Result:
    xs = inputs() if xs is None else xs
    torch.manual_seed(2)
    return result(model, xs, step(model, xs))


def error(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The error of the gradients' global norm; which of them are None must be equal."""
    assert [g is None for g in found] == [g is None for g in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    flat, true = (torch.cat([g.double().flatten() for g in gs]) for gs in zip(*pairs, strict=True))
    return float((flat - true).norm() / true.norm())


def expect_equal(found: Result, expected: Result, tolerance: float = 1e-13) -> None:
    assert all(map(torch.equal, found.outputs, expected.outputs))
    assert all(map(torch.equal, found.buffers, expected.buffers))
    assert torch.equal(found.rng, expected.rng)
    assert error(found.gradients, expected.gradients) < tolerance


def expect_stored_run(
    step: Callable[..., Sequence[Tensor]] = step,
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-13,
    **options: Any,
) -> Result:
    """Expects that the reversible run equals the stored one, and returns the latter."""
    stored, found = (
        train(build(mode, dtype=dtype, **options), step, xs=inputs(dtype)) for mode in MODES
    )
    expect_equal(found, stored, tolerance)
    return stored
