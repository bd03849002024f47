"""The expected results: batch normalization of the whole batch in NumPy and float64.

Every element x_i of the batch has a share p_i in the statistics, with sum(p) = 1::

    mean = sum(p * x)    var = sum(p * (x - mean)**2)    xhat = (x - mean) / sqrt(var + eps)
    dx = weight / sqrt(var + eps) * (dy - p * (sum(dy) + xhat * sum(dy * xhat)))

With equal shares this is Ioffe & Szegedy (2015). The weighting determines the shares.
"""

import numpy as np

from multibn.parity.cases import CHANNELS, EPS, MOMENTUM, Case, NDArrayAny

# One rank's arrays by "step/quantity"; gradients of weight and bias are means over the ranks.
Arrays = dict[str, NDArrayAny]


def train(case: Case, size: int, *, running_var: str | None = None) -> list[Arrays]:
    """What each of `size` ranks should compute in every step of `case`.

    `running_var` replaces the convention of the case.
    """
    results: list[Arrays] = [{} for _ in range(size)]
    mean = [np.zeros(CHANNELS) for _ in range(size)]
    var = [np.ones(CHANNELS) for _ in range(size)]
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        step_arrays, batch_mean, batch_var = _step(case, xs, dys, masks)
        momentum = 1 / (step + 1) if case.cumulative else MOMENTUM
        for rank, arrays in enumerate(step_arrays):
            factor = _factor(running_var or case.running_var, masks, rank)
            mean[rank] = (1 - momentum) * mean[rank] + momentum * batch_mean
            var[rank] = (1 - momentum) * var[rank] + momentum * factor * batch_var
            arrays |= {"running_mean": mean[rank], "running_var": var[rank]}
            results[rank] |= {f"{step}/{name}": a for name, a in arrays.items()}
    weight, bias = (a.astype(np.float64) for a in case.parameters())
    for rank, (x, mask) in enumerate(zip(xs, masks, strict=True)):
        rows = (_rows(x, mask) - mean[rank]) / np.sqrt(var[rank] + EPS) * weight + bias
        results[rank][f"{step}/eval"] = _unrows(rows, mask)
    return results


def _step(
    case: Case, xs: list[NDArrayAny], dys: list[NDArrayAny], masks: list[NDArrayAny]
) -> tuple[list[Arrays], NDArrayAny, NDArrayAny]:
    """Each rank's arrays of one step, and mean and biased variance of the batch."""
    weight, bias = (a.astype(np.float64) for a in case.parameters())
    x, dy = (np.concatenate(list(map(_rows, arrays, masks))) for arrays in (xs, dys))
    p = _shares(case.weighting, masks)[:, None]
    mean = (p * x).sum(0)
    var = (p * (x - mean) ** 2).sum(0)
    std = np.sqrt(var + EPS)
    xhat = (x - mean) / std
    dweight, dbias = (dy * xhat).sum(0), dy.sum(0)
    y = weight * xhat + bias
    dx = weight / std * (dy - p * (dbias + xhat * dweight))
    stops = np.cumsum([mask.sum() for mask in masks])[:-1]
    parts = zip(np.split(y, stops), np.split(dx, stops), masks, strict=True)
    sums = {"dweight": dweight / len(xs), "dbias": dbias / len(xs)}
    arrays = [{"y": _unrows(a, mask), "dx": _unrows(b, mask), **sums} for a, b, mask in parts]
    return arrays, mean, var


def _shares(weighting: str, masks: list[NDArrayAny]) -> NDArrayAny:
    shares = []
    for mask in masks:
        count = mask.sum()
        samples = sum(sample.any() for sample in mask)
        weight = {"element": count, "sample": samples, "rank": 1}[weighting] if count else 0
        shares.append(np.full(count, weight / max(count, 1)))
    p = np.concatenate(shares)
    return p / p.sum()


def _factor(running_var: str, masks: list[NDArrayAny], rank: int) -> float:
    """The factor from the biased variance to that of the convention."""
    if running_var == "biased":
        return 1.0
    counted = [masks[rank]] if running_var == "unbiased_local" else masks
    n = sum(mask.sum() for mask in counted)
    return n / max(n - 1, 1)


def _rows(a: NDArrayAny, mask: NDArrayAny) -> NDArrayAny:
    """The elements of `(N, C, *spatial)` that count as `(elements, C)` in float64."""
    return np.moveaxis(a, 1, -1)[mask].astype(np.float64)


def _unrows(rows: NDArrayAny, mask: NDArrayAny) -> NDArrayAny:
    """The opposite of `_rows`; 0 for the elements that do not count."""
    whole = np.zeros((*mask.shape, CHANNELS))
    whole[mask] = rows
    return np.moveaxis(whole, -1, 1)
