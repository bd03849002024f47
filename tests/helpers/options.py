"""Every option of a layer, with values that are not the default."""

from typing import Any

OTHERS: dict[str, list[Any]] = {
    "eps": [0.3],
    "momentum": [0.7, None],
    "affine": [False],
    "bias": [False],
    "track_running_stats": [False],
    "weighting": ["sample", "rank"],
    "running_var": ["unbiased_local", "biased"],
    "nonfinite": ["skip"],
    "fuse_relu": [True],
    "num_splits": [2],
}
