"""An independent batch norm of the concatenated batch: plain NumPy, float64, chain rule by hand.

Written after the equations of Ioffe & Szegedy (2015), section 3, generalised to weighted elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Result:
    """Of one step; lists have an entry per rank, the rest belongs to the whole batch."""

    y: list[Array]
    dx: list[Array]
    dweight: Array
    dbias: Array
    mean: Array
    var: Array
    count: int


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
    """Batch norm of the ranks' batches `xs`, each `(N, C, *spatial)`, and its gradients.

    With `masks`, each `(N, *spatial)`, that of the elements where the mask is True, without the
    others; `y` and `dx` are then 0 elsewhere. `num_samples` of each rank, for the weighting
    "sample", are by default the lengths of `xs`.
    """
    if masks is not None:
        return _of_elements(xs, dys, masks, weight, bias, eps=eps, weighting=weighting)
    rank_weight = {
        "element": [x[:, 0].size for x in xs],
        "sample": num_samples or [len(x) for x in xs],
        "rank": [min(x.size, 1) for x in xs],
    }[weighting]
    # p: the share of each element in the mean; 1/N for the concatenated batch.
    p = np.concatenate(
        [
            np.full(x[:, 0].size, a / x[:, 0].size) if x.size else np.zeros(0)
            for x, a in zip(xs, rank_weight, strict=True)
        ]
    )
    p /= p.sum()
    x = _rows(xs)
    dy = _rows(dys)
    w, b = weight.astype(np.float64)[:, None], bias.astype(np.float64)[:, None]

    mean = (p * x).sum(1, keepdims=True)
    centred = x - mean
    var = (p * centred**2).sum(1, keepdims=True)
    std = np.sqrt(var + eps)
    xhat = centred / std

    dxhat = dy * w
    dvar = (dxhat * centred).sum(1, keepdims=True) * -0.5 / std**3
    dmean = -(dxhat / std).sum(1, keepdims=True) - 2 * dvar * (p * centred).sum(1, keepdims=True)
    dx = dxhat / std + 2 * p * centred * dvar + p * dmean
    return Result(
        _unrows(xhat * w + b, xs),
        _unrows(dx, xs),
        (dy * xhat).sum(1),
        dy.sum(1),
        mean[:, 0],
        var[:, 0],
        p.size,
    )


def _of_elements(
    xs: Sequence[Array],
    dys: Sequence[Array],
    masks: Sequence[Array],
    weight: Array,
    bias: Array,
    *,
    eps: float,
    weighting: str,
) -> Result:
    def chosen(arrays: Sequence[Array]) -> list[Array]:
        return [np.moveaxis(a, 1, -1)[m] for a, m in zip(arrays, masks, strict=True)]

    def whole(parts: Sequence[Array]) -> list[Array]:
        results = []
        for part, x, mask in zip(parts, xs, masks, strict=True):
            result = np.zeros(np.moveaxis(x, 1, -1).shape)
            result[mask] = part
            results.append(np.moveaxis(result, -1, 1))
        return results

    result = batch_norm(
        chosen(xs),
        chosen(dys),
        weight,
        bias,
        eps=eps,
        weighting=weighting,
        num_samples=[int(m.any(tuple(range(1, m.ndim))).sum()) for m in masks],
    )
    return replace(result, y=whole(result.y), dx=whole(result.dx))


def running(
    old: tuple[Array, Array], mean: Array, var: Array, factor: float, momentum: float
) -> tuple[Array, Array]:
    """Running mean and variance after one batch; `factor` makes the variance unbiased, or not."""
    return (
        (1 - momentum) * old[0] + momentum * mean,
        (1 - momentum) * old[1] + momentum * factor * var,
    )


def relative_error(got: Any, expected: Any) -> float:
    """Largest error, relative to the largest entry of `expected`; NaN counts as infinite."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if expected.size == 0:
        return 0.0
    error = np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-300)
    return float("inf") if np.isnan(error) else float(error)


def _rows(parts: Sequence[Array]) -> Array:
    """All elements of all ranks, `(C, total)`, in float64."""
    channels = parts[0].shape[1]
    return np.concatenate(
        [np.moveaxis(a.astype(np.float64), 1, 0).reshape(channels, a[:, 0].size) for a in parts],
        axis=1,
    )


def _unrows(rows: Array, like: Sequence[Array]) -> list[Array]:
    stops = np.cumsum([a[:, 0].size for a in like])[:-1]
    return [
        np.moveaxis(part.reshape(a.shape[1], a.shape[0], *a.shape[2:]), 0, 1)
        for part, a in zip(np.split(rows, stops, axis=1), like, strict=True)
    ]
