"""Pooling of the states of separately trained copies of a model (federated learning)."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from multibn._arrays import from_host
from multibn._typing import Array, check_bool, check_number
from multibn.checkpoint import files
from multibn.checkpoint.files import CheckpointError, format_keys
from multibn.engine.running import pool_running

# How the keys of mean and variance end in torch, Chainer, Keras, Paddle, Haiku and flax.
_RUNNING = (
    ("running_mean", "running_var"),
    ("avg_mean", "avg_var"),
    ("moving_mean", "moving_variance"),
    ("_mean", "_variance"),
    ("mean_ema/average", "var_ema/average"),
    ("mean", "var"),
)
# Endings that need no separator before them: escnn has regular_running_mean.
_SUFFIXES = "running_mean", "avg_mean", "moving_mean"
_COUNTERS = "num_batches_tracked", "N", "mean_ema/counter", "var_ema/counter"


def pool_states(
    states: Sequence[Any],
    counts: Sequence[float],
    *,
    average_parameters: bool = False,
    instance_norms: Sequence[str] = (),
) -> dict[str, Array]:
    """Combine the states of copies of a model that clients or sites trained separately.

    Running statistics become those of all data together, weighted by count: the mean of the means,
    and the mean of the variances plus the variance of the means. Running statistics are recognized
    by their names in torch, Chainer, Keras, flax, Haiku and Paddle. To pool over ranks, use
    `sync_running_stats`.

    Parameters
    ----------
    states
        State dicts of torch, or dicts that map the names in an npz file of Chainer to arrays.
    counts
        The number of samples on which each state was trained.
    average_parameters
        Average all other floating-point arrays too. By default, all other arrays must be equal.
    instance_norms
        Names of instance norms that have running statistics, or shell-style patterns, `["*.in"]`
        for example: a state does not show whether a layer is a batch norm. The variance of an
        instance norm becomes the mean of the variances, without the variance of the means.

    Returns
    -------
    dict
        Arrays of the first state's library and dtypes. Counters of batches are those of the first
        state; in other states, they may be missing or have a different shape or dtype.

    Raises
    ------
    CheckpointError
        If a value is not an array of real numbers; if keys, shapes, dtypes or arrays that are not
        pooled differ; or if a pooled number is too large for its dtype.
    FloatingPointError
        If an array to be pooled contains NaN or infinity, or a variance is negative.
    TypeError, ValueError
        If `states` is not a list of dicts, `counts` does not have a positive number for each state,
        or an entry of `instance_norms` matches no layer.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import pool_states
    >>> sites = [{"avg_mean": np.full(1, mean), "avg_var": np.ones(1)} for mean in (0.0, 8.0)]
    >>> print(pool_states(sites, [300, 100]))
    {'avg_mean': array([2.]), 'avg_var': array([13.])}
    """
    is_list = isinstance(states, Sequence)
    for wrong in [s for s in states if not isinstance(s, Mapping)] if is_list else [states]:
        raise TypeError(
            "`states` must be a list of dicts that map names to arrays: got "
            f"{type(wrong).__name__}{' in the list' if is_list else ''}. Convert a list of arrays "
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
    """Pool states as `pool_states` does; errors name states by their `sources`."""
    if not states or len(counts) != len(states):
        raise ValueError(
            "`states` and `counts` must have the same length, at least 1: got "
            f"{len(states)} and {len(counts)}."
        )
    for count in counts:
        check_number("counts", count, "(0, inf)")
    # Counters are not compared: torch loads them in any shape and dtype, or a state without them.
    counters = {
        _layer(key.removesuffix(end)) + name
        for key in {key for state in states for key in state}
        for end, _ in _RUNNING
        if key.endswith(end)
        for name in _COUNTERS
    }
    compared = [{key: state[key] for key in state if key not in counters} for state in states]
    hosts = [{key: files.to_numpy(state, key) for key in state} for state in compared]
    types = [{key: f"{tuple(a.shape)} {a.dtype}" for key, a in s.items()} for s in hosts]
    for i, each in enumerate(types):
        for key, _ in sorted(each.items() ^ types[0].items()):
            raise CheckpointError(
                f"all states must have {key!r}, with the same shape and dtype: got "
                f"{types[0].get(key, 'none')} in {sources[0]} and {each.get(key, 'none')} in "
                f"{sources[i]}. Pool states of one model."
            )
    # Equal counts have weight 1, so that sums have the same bits as an allreduce over the models.
    weights = [count / max(counts) for count in counts]

    def stack(key: str, *, is_var: bool = False) -> Array:  # in float64; axis 0: states
        for source, host in zip(sources, hosts, strict=True):
            if not np.all(np.isfinite(host[key])):
                raise FloatingPointError(
                    f"{key!r} must be finite in every state: got NaN or infinity in {source}. "
                    "Leave this state out."
                )
            if is_var and np.any(host[key] < 0):
                raise FloatingPointError(
                    f"{key!r} is a variance and must not be negative: got {host[key].min():.3g} in "
                    f"{source}. Leave this state out, or compute its running statistics again."
                )
        return np.stack([host[key].astype(np.float64) for host in hosts])

    def average(a: Array) -> Array:
        return sum(weight * row for weight, row in zip(weights, a, strict=True)) / sum(weights)

    pooled = {
        key: average(stack(key))
        for key in hosts[0]
        if average_parameters and hosts[0][key].dtype.kind == "f"
    }
    statistics = [*_running_statistics(hosts[0])]
    names = [layer[:-1] for layer, *_ in statistics]
    patterns = [instance_norms] if isinstance(instance_norms, str) else instance_norms
    for pattern in patterns:
        if not any(fnmatchcase(name, str(pattern)) for name in names):
            raise ValueError(
                f"`instance_norms` must match layers with running statistics: got {pattern!r}, "
                f"but found {format_keys(names) or 'none'}."
            )
    for name, (_, mean, var) in zip(names, statistics, strict=True):
        is_instance = any(fnmatchcase(name, pattern) for pattern in patterns)
        pooled[mean], pooled[var] = pool_running(
            stack(mean), stack(var, is_var=True), average, between=float(not is_instance)
        )
    unequal = {key for key in hosts[0] if len({host[key].tobytes() for host in hosts}) > 1}
    if unpooled := unequal - pooled.keys():
        raise CheckpointError(
            f"states differ in {format_keys(sorted(unpooled))}, but only running statistics are "
            "pooled by default. Leave these arrays out, rename running statistics to running_mean "
            "and running_var, or average floating-point arrays by average_parameters=True."
        )
    result = dict(states[0])
    for key, a in pooled.items():
        with np.errstate(over="ignore"):
            result[key] = from_host(np.asarray(a), states[0][key])
        if np.any(np.isfinite(a) & ~np.isfinite(files.to_numpy(result, key))):
            raise CheckpointError(
                f"{key!r} is too large for {result[key].dtype}. Pool float32 states."
            )
    return result


def _running_statistics(state: Mapping[str, Array]) -> Iterator[tuple[str, str, str]]:
    """Yield (prefix, key of mean, key of variance) for each layer with running statistics."""
    for mean in state:
        for end, end_of_var in _RUNNING:
            start = mean.removesuffix(end)
            var = start + end_of_var
            shapes = {a.shape for a in (state[mean], state.get(var, np.zeros((0, 0))))}
            if start == mean or len(shapes) > 1 or state[mean].dtype.kind != "f":
                continue
            layer = _layer(start)
            is_flax = "batch_stats" in mean or f"{layer}scale" in state
            if end in _SUFFIXES or (start == layer and (end != "mean" or is_flax)):
                yield layer, mean, var
                break


def _layer(key: str) -> str:
    """Return a key up to its last separator, including the separator."""
    return key[: max(map(key.rfind, "./")) + 1]
