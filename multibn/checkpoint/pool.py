"""One state from those of models that were trained apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from multibn._arrays import from_host
from multibn._typing import Array, check_bool, check_number
from multibn.checkpoint import files
from multibn.checkpoint.translate import CHAINER, TORCH, some
from multibn.engine.running import pool_running


def pool_states(
    states: Sequence[Any], counts: Sequence[float], *, average_parameters: bool = False
) -> dict[str, Array]:
    """One state from those of one model's copies, trained apart: by client, by site, by domain.

    Running statistics become those of all data together: the mean of the means, and the mean of the
    variances plus the variance of the means, weighted by count. Ranks have `sync_running_stats`.

    Parameters
    ----------
    states
        State dicts of torch, or arrays of Chainer by their names in the npz file.
    counts
        The number of samples behind each state.
    average_parameters
        Average all other floating-point arrays too. By default, all other arrays must be equal.

    Returns
    -------
    dict
        Arrays of the first state's library and dtypes, with its counters of batches. Those of the
        other states may have another shape or dtype, or be missing.

    Raises
    ------
    CheckpointError
        If a value is no array of real numbers, if keys, shapes, dtypes or other arrays differ, or
        if a pooled number is too large for its dtype.
    FloatingPointError
        If a state has NaN or infinity where numbers are pooled.
    TypeError, ValueError
        If `states` are no list of dicts, or `counts` not as many positive numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import pool_states
    >>> sites = [{"avg_mean": np.full(1, mean), "avg_var": np.ones(1)} for mean in (0.0, 8.0)]
    >>> print(pool_states(sites, [300, 100]))
    {'avg_mean': array([2.]), 'avg_var': array([13.])}
    """
    is_list = isinstance(states, Sequence)
    for wrong in [one for one in states if not isinstance(one, Mapping)] if is_list else [states]:
        raise TypeError(
            "`states` must be a list of dicts, each of arrays by their names: got "
            f"{type(wrong).__name__}{' in the list' if is_list else ''}. Of a list of arrays, pass "
            "dict(zip(model.state_dict(), arrays))."
        )
    check_bool(average_parameters=average_parameters)
    return pool(states, counts, [f"states[{i}]" for i in range(len(states))], average_parameters)


def pool(
    states: Sequence[Any], counts: Sequence[float], sources: Sequence[object], average_all: bool
) -> dict[str, Array]:
    """`pool_states`; `sources` are the words for the states in errors."""
    if not states or len(counts) != len(states):
        raise ValueError(
            f"`counts` must have one number for each state: got {len(counts)} for {len(states)}."
        )
    for count in counts:
        check_number("counts", count, "(0, inf)")
    norms = [names[-3:] for names in (TORCH.norm, CHAINER.norm)]
    keys = {key for state in states for key in state}
    # The result has the first state's; torch loads other shapes and dtypes of counters, and none.
    counters = {
        key.removesuffix(mean) + counter
        for mean, _, counter in norms
        for key in keys
        if key.endswith(mean)
    }
    alike = [{key: state[key] for key in state if key not in counters} for state in states]
    hosts = [{key: files.to_numpy(state, key) for key in state} for state in alike]
    kinds = [{key: f"{tuple(a.shape)} {a.dtype}" for key, a in s.items()} for s in alike]
    for i, kind in enumerate(kinds):
        for key, _ in sorted(kind.items() ^ kinds[0].items()):
            raise files.CheckpointError(
                f"all states must have {key!r}, of one shape and dtype: got "
                f"{kinds[0].get(key, 'none')} in {sources[0]} and {kind.get(key, 'none')} in "
                f"{sources[i]}. Pool states of one model."
            )
    # Equal counts become 1, so that the sums are those of as many ranks, to the last bit.
    weights = [count / max(counts) for count in counts]

    def wide(key: str) -> Array:  # the states are axis 0
        for source, host in zip(sources, hosts, strict=True):
            if not np.all(np.isfinite(host[key])):
                raise FloatingPointError(
                    f"{key!r} must be finite in every state: got NaN or infinity in {source}. "
                    "Leave that state out."
                )
        return np.stack([host[key].astype(np.float64) for host in hosts])

    def average(a: Array) -> Array:
        return sum(weight * one for weight, one in zip(weights, a, strict=True)) / sum(weights)

    floating = {key: a for key, a in hosts[0].items() if a.dtype.kind == "f"}
    pooled = {key: average(wide(key)) for key in floating if average_all}
    unequal = {key for key in hosts[0] if len({host[key].tobytes() for host in hosts}) > 1}
    for mean, var, _ in norms:
        for layer in [key.removesuffix(mean) for key in floating if key.endswith(mean)]:
            one, other = layer + mean, layer + var
            if other in floating and floating[one].shape == floating[other].shape:
                pooled[one], pooled[other] = pool_running(wide(one), wide(other), average)
    if refused := unequal - pooled.keys():
        raise files.CheckpointError(
            f"only running statistics may differ: {some(sorted(refused))} are not equal in all "
            "states. Leave them out, or pass average_parameters=True for floating-point arrays."
        )
    result = dict(states[0])
    for key, a in pooled.items():
        with np.errstate(over="ignore"):
            result[key] = from_host(np.asarray(a), states[0][key])
        if np.any(np.isfinite(a) & ~np.isfinite(files.to_numpy(result, key))):
            raise files.CheckpointError(
                f"{key!r} is too large for {result[key].dtype}. Pool float32 states."
            )
    return result
