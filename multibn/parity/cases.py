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

# From a rank and the number of ranks: its batch size, and by how much its spatial sizes exceed
# those of rank 0.
SPLITS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "even": lambda rank, size: (4, 0),
    "uneven": lambda rank, size: (2 + 3 * rank, 0),
    "empty": lambda rank, size: (0 if rank == size // 2 > 0 else 4, 0),
    "spatial": lambda rank, size: (4, 2 * rank),
    "uneven-spatial": lambda rank, size: (2 + 3 * rank, 2 * rank),
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
    masked_value: float | None = None  # of the elements that a mask leaves out

    def parameters(self) -> tuple[Array, Array]:
        """Weight and bias of the layer; the same on every rank."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dtype = np.promote_types(self.dtype, np.float32)
        weight, bias = rng.normal(1, 0.3, CHANNELS), rng.normal(0, 0.3, CHANNELS)
        return weight.astype(dtype), bias.astype(dtype)

    def batches(self, size: int, step: int) -> tuple[list[Array], ...]:
        """Inputs, output gradients and masks of all `size` ranks; the same on every rank.

        Without `masked_value`, the masks are all True. With it, only the mask of the first sample
        of rank 0 is, so that at least one element counts.
        """
        seed = [zlib.crc32(self.name.encode()), size, step]
        rng, rng_of_masks = np.random.default_rng(seed), np.random.default_rng([*seed, 1])
        ones = (1,) * len(self.spatial)
        offset = self.mean + self.std * rng.normal(size=(1, CHANNELS, *ones))
        xs, dys, masks = [], [], []
        for rank in range(size):
            num_samples, larger_by = SPLITS[self.split](rank, size)
            spatial = tuple(n + larger_by for n in self.spatial)
            shape = (num_samples, CHANNELS, *spatial)
            xs.append(self._laid_out(offset + self.std * rng.normal(size=shape)))
            dys.append(self._laid_out(rng.normal(size=shape)))
            masks.append(np.ones((num_samples, *spatial), bool))
            if self.masked_value is not None:
                numbers = rng_of_masks.random((num_samples, *spatial))
                masks[rank] = numbers < rng_of_masks.random((num_samples, *ones))
                masks[rank][: rank == 0] = True
                np.moveaxis(xs[rank], 1, -1)[~masks[rank]] = self.masked_value
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
    Case("mean-1e4-float64", mean=1e4, std=1.0, dtype="float64"),
    Case("std-1e-3", std=1e-3),
    Case("20-steps", steps=20),
    Case("cumulative", cumulative=True),
    Case("cumulative-uneven", cumulative=True, split="uneven"),
    Case("recompute", recompute=True),
    Case("rank-weights", split="uneven-spatial", weighting="rank"),
    Case("sample-weights", split="uneven-spatial", weighting="sample"),
    Case("biased-var", running_var="biased"),
    Case("local-count-var", split="uneven", running_var="unbiased_local"),
    Case("masked", masked_value=math.nan, steps=5),
    Case("masked-float64", masked_value=math.inf, dtype="float64", split="uneven", steps=5),
    Case("masked-channels_last", masked_value=1e30, layout="channels_last", split="empty"),
    Case("masked-recompute", masked_value=math.nan, split="spatial", recompute=True),
    Case("masked-rank-weights", masked_value=math.nan, split="uneven-spatial", weighting="rank"),
    Case(
        "masked-sample-weights", masked_value=math.nan, split="uneven-spatial", weighting="sample"
    ),
    Case("masked-local-count-var", masked_value=0.0, split="uneven", running_var="unbiased_local"),
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
