"""Cases for pytest.mark.parametrize: products that do not multiply, and every option."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from multibn.engine.masks import WEIGHTINGS

nan, inf = math.nan, math.inf

# The options of a layer, each with values that are not the default.
OTHERS: dict[str, list[Any]] = {
    "eps": [0.3],
    "momentum": [0.7, None],
    "affine": [False],
    "bias": [False],
    "track_running_stats": [False],
    "weighting": [word for word in WEIGHTINGS if word != "element"],
    "running_var": ["unbiased_local", "biased"],
    "nonfinite": ["skip"],
    "fuse_relu": [True],
    "num_splits": [2],
}

# What a number among them must refuse; choices and flags have one rule each.
REFUSED: dict[str, tuple[Any, ...]] = {
    "eps": (1e-40, 0, -0.5, nan, "0.5", True, inf, None),  # 1e-40: subnormal in float32
    "momentum": (-0.1, 1.1, nan, "0.5", True, inf),  # None: the cumulative average
    "num_splits": (0, -1, 2.5, nan, inf, "2", True, None),
}


def spread(*axes: Sequence[Any], over: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """All combinations of `axes`, each with one value of each list of `over`, in turn.

    Where two axes are as long as a list of `over`, its values meet each value of both.
    """
    cases = []
    for indices in product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, indices, strict=True)]
        cases.append((*values, *(other[sum(indices) % len(other)] for other in over)))
    return cases
