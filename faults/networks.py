"""The networks that are trained while faults are injected, in torch and Chainer."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

FEATURES, CHANNELS = 6, 4
NARROW = 2  # channels of the narrow branch
PATHS = [f"layer{i}.{j}.bn{k}" for i, j in ((1, 0), (1, 1), (2, 0)) for k in (1, 2)]

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
MakeNorm: TypeAlias = Callable[[int], Any]


def batch(step: int, rank: int, count: int) -> Array:
    """Return a rank's batch of `count` samples in a step: the same numbers in every program."""
    return np.random.default_rng([step, rank]).normal(rank, 1 + rank, size=(count, FEATURES))


def make_network(kind: str, make_norm: MakeNorm, of: Any, channels: int = CHANNELS) -> Any:
    """Make a network; `of` is a Trainee class, which supplies the modules of its framework.

    Kind "blocks" has six batch norms, "layer1.0.bn1" and so on. "branches" has two parallel batch
    norms of different widths. "norm first" and "norm second" are sequences of three layers.
    """

    class Block(of.Module):
        def __init__(self) -> None:
            super().__init__()
            self.swapped = self.skipped = self.evaluates = False
            with of.children_of(self):
                self.bn1, self.bn2 = make_norm(channels), make_norm(channels)

        def forward(self, x: Any) -> Any:
            first, second = (self.bn2, self.bn1) if self.swapped else (self.bn1, self.bn2)
            with of.evaluation(self.bn1, self.evaluates):
                x = first(x)
            return of.tanh(x if self.skipped else second(x))

    class Blocks(of.Module):
        def __init__(self) -> None:
            super().__init__()
            self.misses_stem = self.recomputes = False
            with of.children_of(self):
                self.stem = of.linear(FEATURES, channels)
                self.layer1 = of.Sequential(Block(), Block())
                self.layer2 = of.Sequential(Block())

        def forward(self, x: Any) -> Any:
            x = x if self.misses_stem else self.stem(x)
            x = of.recomputed(self.layer1, x) if self.recomputes else self.layer1(x)
            return self.layer2(x)

    class Branches(of.Module):
        def __init__(self) -> None:
            super().__init__()
            self.swapped = False
            with of.children_of(self):
                self.narrow, self.wide = make_norm(NARROW), make_norm(FEATURES)

        def forward(self, x: Any) -> Any:
            if self.swapped:
                wide, narrow = self.wide(x), self.narrow(x[:, :NARROW])
            else:
                narrow, wide = self.narrow(x[:, :NARROW]), self.wide(x)
            return of.concat([narrow, wide])

    if kind == "blocks":
        return Blocks()
    if kind == "branches":
        return Branches()
    norms, linear = [make_norm(FEATURES), make_norm(FEATURES)], of.linear(FEATURES, FEATURES)
    layers = {"norm first": [norms[0], linear, norms[1]], "norm second": [linear, *norms]}
    return of.Sequential(*layers[kind])
