"""One state from those of models that were trained apart."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from multibn._arrays import array_namespace, to_host
from multibn._typing import Array, check_number
from multibn.checkpoint import files, keys
from multibn.checkpoint.files import CheckpointError
from multibn.engine.population import pool_running
from multibn.kernels.generic import as_wide


def pool_states(
    states: Sequence[Any], counts: Sequence[float], *, average_parameters: bool = False
) -> dict[str, Array]:
    """One state from those of one model's copies, trained apart: by client, by site, by domain.

    Running statistics become those of all data together: the mean of the means, and the mean of the
    variances plus the variance of the means, weighted by count. For ranks of one job, see
    `sync_running_stats(model, how="pool")`.

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
        Arrays of the first state's library and dtypes, with its counters of batches.

    Raises
    ------
    CheckpointError
        If a value is no array of real numbers; if keys, shapes or dtypes differ, or arrays that are
        neither pooled nor averaged; if a pooled number is too large for its dtype.
    TypeError, ValueError
        If `counts` are not as many positive numbers as there are states.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import pool_states
    >>> sites = [{"avg_mean": np.full(1, mean), "avg_var": np.ones(1)} for mean in (0.0, 8.0)]
    >>> print(pool_states(sites, [300, 100]))
    {'avg_mean': array([2.]), 'avg_var': array([13.])}
    """
    if not states or len(counts) != len(states):
        raise ValueError(
            f"`counts` must have one number for each of 1 or more states: got {len(counts)} for "
            f"{len(states)}. Pass the number of samples behind each."
        )
    for count in counts:
        check_number("counts", count, "(0, inf)")
    states = [{key: _numbers(state, key) for key in state} for state in states]
    for key in dict.fromkeys(chain(*states)):
        kinds = [f"{tuple(s[key].shape)} {s[key].dtype}" if key in s else "none" for s in states]
        for i, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise CheckpointError(
                    f"all states must have {key!r}, of one shape and dtype: got {kinds[0]} in "
                    f"states[0] and {kind} in states[{i}]. Pool states of one model."
                )
    # Equal counts become 1, so that the sums are those of as many ranks, to the last bit.
    weights = [count / max(counts) for count in counts]
    first, pooled = states[0], {}

    def wide(key: str) -> Array:  # the states are axis 0
        return array_namespace(first[key]).stack([as_wide(state[key]) for state in states])

    def average(a: Array) -> Array:
        return sum(weight * a[i] for i, weight in enumerate(weights)) / sum(weights)

    others = dict(first)
    for mean, var, counter in keys.running_statistics(first):
        for key in (mean, var):
            if not _is_floating(first[key]):
                raise CheckpointError(f"{key!r} must be floating-point: got {first[key].dtype}.")
        pooled[mean], pooled[var] = pool_running(wide(mean), wide(var), average)
        for key in (mean, var, counter):
            others.pop(key, None)
    unequal = []
    for key, a in others.items():
        if average_parameters and _is_floating(a):
            pooled[key] = average(wide(key))
        elif len({to_host(state[key]).tobytes() for state in states}) > 1:
            unequal.append(key)
    if unequal:
        advice = "Leave them out" if average_parameters else "Pass average_parameters=True"
        raise CheckpointError(
            f"only running statistics may differ: {keys.some(unequal)} are not equal in all "
            f"states. {advice}, if the models were trained apart."
        )
    return first | {key: _narrowed(key, a, first[key].dtype) for key, a in pooled.items()}


def _numbers(state: Any, key: str) -> Array:
    """The array of a state under a key, if all of its numbers are in memory."""
    a = files.array_of(state, key)
    layout = str(getattr(a, "layout", "torch.strided"))
    if getattr(a, "is_meta", False) or layout != "torch.strided":
        raise CheckpointError(f"{key!r} must be a dense array with numbers: got {a!r:.60}.")
    return a


def _is_floating(a: Array) -> bool:
    return array_namespace(a).isdtype(a.dtype, "real floating")


def _narrowed(key: str, wide: Array, dtype: Any) -> Array:
    xp = array_namespace(wide)
    if bool(xp.any(xp.isfinite(wide) & (xp.abs(wide) > xp.finfo(dtype).max))):
        raise CheckpointError(f"{key!r} is too large for {dtype}. Pool the states in float32.")
    return xp.astype(wide, dtype)


def pool_files(
    sources: Sequence[Path], target: Path, counts: Sequence[float], prefix: str, average: bool
) -> dict[str, Array]:
    """Write the pool of the files `sources` to `target`, and return its arrays."""
    with files.about(target):
        framework = files.check_target(target, sources)
    states = []
    for source in sources:
        with files.about(source):
            if files.framework(source) != framework:
                raise CheckpointError(f"must be of {framework}, as {target} is. Convert the file.")
            states.append(files.read(source, prefix))
    pool = pool_states(states, counts, average_parameters=average)
    with files.about(target):
        files.write(target, pool)
    return pool
