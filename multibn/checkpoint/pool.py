"""Pool the states of copies of a model that were trained separately (federated learning)."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from multibn._arrays import from_host
from multibn._typing import Array, check_bool, check_number
from multibn.checkpoint import files
from multibn.checkpoint.translate import format_keys
from multibn.engine.running import pool_running

# Mean and variance of torch, Chainer, Keras, Paddle, Haiku and flax: the ends of their keys.
_RUNNING = (
    ("running_mean", "running_var"),
    ("avg_mean", "avg_var"),
    ("moving_mean", "moving_variance"),
    ("_mean", "_variance"),
    ("mean_ema/average", "var_ema/average"),
    ("mean", "var"),
)
_AFTER_WORDS = "running_mean", "avg_mean", "moving_mean"  # escnn's are regular_running_mean
_COUNTERS = "num_batches_tracked", "N", "mean_ema/counter", "var_ema/counter"


def pool_states(
    states: Sequence[Any],
    counts: Sequence[float],
    *,
    average_parameters: bool = False,
    instance_norms: Sequence[str] = (),
) -> dict[str, Array]:
    """Combine the states of copies of a model that were trained separately, by clients or sites.

    Running statistics become those of all data together: the mean of the means, and the mean of the
    variances plus the variance of the means, weighted by count. They are known by the names of
    torch, Chainer, Keras, flax, Haiku and Paddle. To pool over ranks, use `sync_running_stats`.

    Parameters
    ----------
    states
        State dicts of torch, or arrays of Chainer by their names in the npz file.
    counts
        The number of samples behind each state.
    average_parameters
        Average all other floating-point arrays too. By default, all other arrays must be equal.
    instance_norms
        The names of instance norms that have running statistics, or patterns of names, `["*.in"]`
        for example: a state does not tell them from batch norms. Their variances are means over
        samples, and become the mean of the variances alone.

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
        If a state has NaN or infinity where numbers are pooled, or a negative variance.
    TypeError, ValueError
        If `states` are no list of dicts, `counts` not as many positive numbers, or an entry of
        `instance_norms` matches no layer.

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
            f"{type(wrong).__name__}{' in the list' if is_list else ''}. Convert lists of arrays "
            "by dict(zip(model.state_dict(), arrays))."
        )
    check_bool(average_parameters=average_parameters)
    sources = [f"states[{i}]" for i in range(len(states))]
    return pool_named_states(states, counts, sources, average_parameters, instance_norms)


def pool_named_states(
    states: Sequence[Any],
    counts: Sequence[float],
    sources: Sequence[object],
    average_parameters: bool,
    instance_norms: Sequence[str],
) -> dict[str, Array]:
    """Run `pool_states`; `sources` are the names of the states in error messages."""
    if not states or len(counts) != len(states):
        raise ValueError(
            f"`counts` must have one number for each state: got {len(counts)} for {len(states)}."
        )
    for count in counts:
        check_number("counts", count, "(0, inf)")
    # The result has the first state's; torch loads other shapes and dtypes of counters, and none.
    counters = {
        _layer(key.removesuffix(end)) + name
        for key in {key for state in states for key in state}
        for end, _ in _RUNNING
        if key.endswith(end)
        for name in _COUNTERS
    }
    alike = [{key: state[key] for key in state if key not in counters} for state in states]
    hosts = [{key: files.to_numpy(state, key) for key in state} for state in alike]
    kinds = [{key: f"{tuple(a.shape)} {a.dtype}" for key, a in s.items()} for s in hosts]
    for i, kind in enumerate(kinds):
        for key, _ in sorted(kind.items() ^ kinds[0].items()):
            raise files.CheckpointError(
                f"all states must have {key!r}, of one shape and dtype: got "
                f"{kinds[0].get(key, 'none')} in {sources[0]} and {kind.get(key, 'none')} in "
                f"{sources[i]}. Pool states of one model."
            )
    # Equal counts become 1, so that the sums are those of as many ranks, to the last bit.
    weights = [count / max(counts) for count in counts]

    def wide(key: str, *, is_var: bool = False) -> Array:  # the states are axis 0
        for source, host in zip(sources, hosts, strict=True):
            if not np.all(np.isfinite(host[key])):
                raise FloatingPointError(
                    f"{key!r} must be finite in every state: got NaN or infinity in {source}. "
                    "Leave that state out."
                )
            if is_var and np.any(host[key] < 0):
                raise FloatingPointError(
                    f"{key!r} must not be negative, as a variance: got {host[key].min():.3g} in "
                    f"{source}. Leave that state out, or compute its running statistics again."
                )
        return np.stack([host[key].astype(np.float64) for host in hosts])

    def average(a: Array) -> Array:
        return sum(weight * one for weight, one in zip(weights, a, strict=True)) / sum(weights)

    pooled = {
        key: average(wide(key))
        for key in hosts[0]
        if average_parameters and hosts[0][key].dtype.kind == "f"
    }
    statistics = [*_running_statistics(hosts[0])]
    names = [layer[:-1] for layer, *_ in statistics]
    patterns = [instance_norms] if isinstance(instance_norms, str) else instance_norms
    for pattern in patterns:
        if not any(fnmatchcase(name, str(pattern)) for name in names):
            raise ValueError(
                f"`instance_norms` must match layers that have running statistics: got {pattern!r} "
                f"for {format_keys(names) or 'none'}."
            )
    for name, (_, mean, var) in zip(names, statistics, strict=True):
        is_instance = any(fnmatchcase(name, pattern) for pattern in patterns)
        pooled[mean], pooled[var] = pool_running(
            wide(mean), wide(var, is_var=True), average, between=float(not is_instance)
        )
    unequal = {key for key in hosts[0] if len({host[key].tobytes() for host in hosts}) > 1}
    if refused := unequal - pooled.keys():
        raise files.CheckpointError(
            f"states differ in {format_keys(sorted(refused))}, but only running statistics are "
            "pooled by default. Leave these arrays out; rename running statistics to running_mean "
            "and running_var; average other floating-point arrays by average_parameters=True."
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


def _running_statistics(state: Mapping[str, Array]) -> Iterator[tuple[str, str, str]]:
    """Yield the prefix of each layer with running statistics, and the keys of mean and variance."""
    for mean in state:
        for end, end_of_var in _RUNNING:
            start = mean.removesuffix(end)
            var = start + end_of_var
            shapes = {a.shape for a in (state[mean], state.get(var, np.zeros((0, 0))))}
            if start == mean or len(shapes) > 1 or state[mean].dtype.kind != "f":
                continue
            layer = _layer(start)
            is_flax = "batch_stats" in mean or f"{layer}scale" in state
            if end in _AFTER_WORDS or (start == layer and (end != "mean" or is_flax)):
                yield layer, mean, var
                break


def _layer(key: str) -> str:
    """Return what stands before the last separator of a key, and the separator."""
    return key[: max(map(key.rfind, "./")) + 1]
