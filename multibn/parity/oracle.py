"""The expected results: batch normalization of the whole batch in NumPy and float64.

Each element x_i of the batch has a weight p_i in the statistics, with sum(p) = 1::

    mean = sum(p * x)    var = sum(p * (x - mean)**2)    xhat = (x - mean) / sqrt(var + eps)
    dx = weight / sqrt(var + eps) * (dy - p * (sum(dy) + xhat * sum(dy * xhat)))

With equal weights, this is Ioffe & Szegedy (2015). The weighting determines the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Result:
    """The results of one step; lists have an entry per rank, arrays are those of all ranks."""

    y: list[Array]
    dx: list[Array]
    dweight: Array  # summed over all ranks, like dbias
    dbias: Array
    mean: Array
    var: Array  # biased
    count: int  # elements per channel


def batch_norm(
    xs: Sequence[Array],
    dys: Sequence[Array],
    weight: Array,
    bias: Array,
    *,
    eps: float,
    weighting: str = "element",
    masks: Sequence[Array] | None = None,
    num_samples: Sequence[int] | None = None,
) -> Result:
    """Normalize the ranks' batches `xs`, each `(N, C, *spatial)`, and compute the gradients.

    `masks`, each `(N, *spatial)`, select the elements in the statistics; elsewhere, `y` and `dx`
    are 0. By default, `num_samples` is each rank's number of samples with any selected element.
    """
    masks = masks or [np.ones(x[:, :1].shape, bool)[:, 0] for x in xs]
    x, dy = (np.concatenate(list(map(_rows, arrays, masks))) for arrays in (xs, dys))
    weight, bias = weight.astype(np.float64), bias.astype(np.float64)
    counts = [int(mask.sum()) for mask in masks]
    samples = num_samples or [sum(sample.any() for sample in mask) for mask in masks]
    rank_weights = {"element": counts, "sample": samples, "rank": [1] * len(xs)}[weighting]
    weights = [np.full(n, w / max(n, 1)) for n, w in zip(counts, rank_weights, strict=True)]
    p = np.concatenate(weights)[:, None]
    p = p / p.sum()
    mean = _sum(p * x)
    mean = mean + _sum(p * (x - mean))  # correct the rounding of the first sum
    var = _sum(p * (x - mean) ** 2)
    std = np.sqrt(var + eps)
    xhat = (x - mean) / std
    dweight, dbias = _sum(dy * xhat), _sum(dy)
    y = weight * xhat + bias
    dx = weight / std * (dy - p * (dbias + xhat * dweight))
    stops = np.cumsum(counts)[:-1]
    ys, dxs = (list(map(_unrows, np.split(rows, stops), masks)) for rows in (y, dx))
    return Result(ys, dxs, dweight, dbias, mean, var, len(x))


def _sum(rows: Array) -> Array:
    """Sum over axis 0 pairwise, as NumPy sums contiguous axes; naive sums of equal terms drift."""
    total: Array = np.ascontiguousarray(rows.T).sum(1)
    return total


def running(
    old: tuple[Array, Array], mean: Array, var: Array, factor: float, momentum: float
) -> tuple[Array, Array]:
    """Return running mean and variance after a batch; `factor` converts the biased variance."""
    return (
        (1 - momentum) * old[0] + momentum * mean,
        (1 - momentum) * old[1] + momentum * factor * var,
    )


def normalize(
    x: Array, mean: Array, var: Array, weight: Array, bias: Array, *, eps: float, mask: Array
) -> Array:
    """Normalize `x` by running statistics; the result is 0 where `mask` is False."""
    return _unrows((_rows(x, mask) - mean) / np.sqrt(var + eps) * weight + bias, mask)


def relative_error(got: Any, expected: Any, scale: Any = None) -> float:
    """Return the largest error, relative to the largest entry of `scale` (default: `expected`).

    The error is infinite for NaN or a wrong shape.
    """
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(expected if scale is None else scale).max()
        error = float(np.abs(got - expected).max() / max(largest, 1e-300))
    return error if np.isfinite(error) else float("inf")


def _rows(a: Array, mask: Array) -> Array:
    """Return the selected elements of `(N, C, *spatial)` as `(elements, C)` in float64."""
    return np.moveaxis(a, 1, -1)[mask].astype(np.float64)


def _unrows(rows: Array, mask: Array) -> Array:
    """Return the inverse of `_rows`; elements that are not selected are 0."""
    whole = np.zeros((*mask.shape, rows.shape[1]))
    whole[mask] = rows
    return np.moveaxis(whole, -1, 1)
