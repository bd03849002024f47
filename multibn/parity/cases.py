"""The cases to compare, each a line of data."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from multibn._typing import RunningVar, Weighting
from multibn.parity.oracle import Array

CHANNELS = 5
EPS = 1e-5
MOMENTUM = 0.2

# Largest error allowed for each quantity, relative to its largest expected entry.
BOUNDS: dict[str, dict[str, float]] = {
    dtype: dict.fromkeys(("y", "dx", "running_mean", "running_var", "eval"), bound)
    | dict.fromkeys(("dweight", "dbias"), sum_bound)
    for dtype, bound, sum_bound in [
        ("float16", 5e-3, 5e-3),
        ("float32", 2e-6, 1e-5),
        ("float64", 1e-11, 1e-11),
    ]
}

# A rank's batch size and spatial sizes, from its rank, the number of ranks and the usual sizes.
SPLITS: dict[str, Callable[[int, int, tuple[int, ...]], tuple[int, tuple[int, ...]]]] = {
    "even": lambda rank, size, spatial: (4, spatial),
    "uneven": lambda rank, size, spatial: (2 + 3 * rank, spatial),
    "empty": lambda rank, size, spatial: (0 if rank == size // 2 > 0 else 4, spatial),
    "spatial": lambda rank, size, spatial: (4, tuple(n + 2 * rank for n in spatial)),
    "both": lambda rank, size, spatial: (2 + 3 * rank, tuple(n + 2 * rank for n in spatial)),
}


@dataclass(frozen=True)
class Case:
    """A few steps of training, and one of evaluation."""

    name: str  # without spaces
    dtype: str = "float32"  # of the activation; parameters are at least float32
    layout: str = "contiguous"  # or "channels_last"
    split: str = "even"  # a key of `SPLITS`
    spatial: tuple[int, ...] = (6, 7)  # sizes of the spatial axes on rank 0
    mean: float = 0.0  # of the data; each channel adds an offset of the order of `std`
    std: float = 2.0
    steps: int = 3  # of training
    cumulative: bool = False  # running statistics are the mean over all steps (`momentum=None`)
    recompute: bool = False  # the backward pass runs the forward pass again
    weighting: Weighting = "element"
    running_var: RunningVar = "unbiased_global"
    padding: float | None = None  # the value of the elements that a mask leaves out
    slack: float = 1.0  # what the bounds are multiplied by

    def bound(self, quantity: str) -> float:
        """The largest error allowed for `quantity`, relative to the largest entry."""
        return self.slack * BOUNDS[self.dtype][quantity]

    def parameters(self) -> tuple[Array, Array]:
        """Weight and bias of the layer; the same on every rank."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dtype = np.promote_types(self.dtype, np.float32)
        weight, bias = rng.normal(1, 0.3, CHANNELS), rng.normal(0, 0.3, CHANNELS)
        return weight.astype(dtype), bias.astype(dtype)

    def batches(self, size: int, step: int) -> tuple[list[Array], ...]:
        """Inputs, output gradients and masks of all `size` ranks; the same on every rank.

        Without `padding` the masks are all True. With it, the first sample of rank 0 still is, so
        that at least one element counts.
        """
        seed = [zlib.crc32(self.name.encode()), size, step]
        rng, rng_of_masks = np.random.default_rng(seed), np.random.default_rng([*seed, 1])
        ones = (1,) * len(self.spatial)
        offset = self.mean + self.std * rng.normal(size=(1, CHANNELS, *ones))
        xs, dys, masks = [], [], []
        for rank in range(size):
            num_samples, spatial = SPLITS[self.split](rank, size, self.spatial)
            shape = (num_samples, CHANNELS, *spatial)
            xs.append(self._laid_out(offset + self.std * rng.normal(size=shape)))
            dys.append(self._laid_out(rng.normal(size=shape)))
            masks.append(np.ones((num_samples, *spatial), bool))
            if self.padding is not None:
                numbers = rng_of_masks.random((num_samples, *spatial))
                masks[rank] = numbers < rng_of_masks.random((num_samples, *ones))
                masks[rank][: rank == 0] = True
                np.moveaxis(xs[rank], 1, -1)[~masks[rank]] = self.padding
        return xs, dys, masks

    def _laid_out(self, a: Array) -> Array:
        a = a.astype(self.dtype)
        if self.layout == "channels_last":
            return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)
        return a


CASES = [
    Case("float32"),
    Case("float64", dtype="float64"),
    Case("float16", dtype="float16"),
    Case("vectors", spatial=()),
    Case("volumes", spatial=(2, 3, 4)),
    Case("channels_last", layout="channels_last"),
    Case("uneven", split="uneven"),
    Case("uneven-float64", split="uneven", dtype="float64"),
    Case("uneven-channels_last", split="uneven", layout="channels_last"),
    Case("empty-rank", split="empty"),
    Case("empty-rank-float64", split="empty", dtype="float64"),
    Case("spatial-sizes", split="spatial"),
    Case("spatial-sizes-float64", split="spatial", dtype="float64"),
    Case("large-map", spatial=(128, 128), layout="channels_last", steps=1),
    Case("mean-100", mean=100.0, std=1.0),
    Case("mean-1e4", mean=1e4, std=1.0),
    # float64 rounds a mean near 1e4 to 1.8e-12, against bounds of 1e-11 of outputs near 1.
    Case("mean-1e4-float64", mean=1e4, std=1.0, dtype="float64", slack=10.0),
    Case("std-1e-3", std=1e-3),
    Case("20-steps", steps=20),
    Case("cumulative", cumulative=True),
    Case("cumulative-uneven", cumulative=True, split="uneven"),
    Case("recompute", recompute=True),
    Case("rank-weights", split="both", weighting="rank"),
    Case("sample-weights", split="both", weighting="sample"),
    Case("biased-var", running_var="biased"),
    Case("local-count-var", split="uneven", running_var="unbiased_local"),
    Case("masked", padding=math.nan, steps=5),
    Case("masked-float64", padding=math.inf, dtype="float64", split="uneven", steps=5),
    Case("masked-channels_last", padding=1e30, layout="channels_last", split="empty"),
    Case("masked-recompute", padding=math.nan, split="spatial", recompute=True),
    Case("masked-rank-weights", padding=math.nan, split="both", weighting="rank"),
    Case("masked-sample-weights", padding=math.nan, split="both", weighting="sample"),
    Case("masked-local-count-var", padding=0.0, split="uneven", running_var="unbiased_local"),
]


def select(patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match one of the shell-style patterns."""
    for each in patterns:
        if not any(fnmatchcase(case.name, each) for case in CASES):
            raise ValueError(
                f"--cases must match the name of a case: got {each!r}. Run multibn parity --help "
                "for all names; '*' stands for any characters."
            )
    return [case for case in CASES if any(fnmatchcase(case.name, each) for each in patterns)]
