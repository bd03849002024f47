"""Precise batch norm: running statistics from a whole pass over the data."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from multibn import wire
from multibn._typing import check_int
from multibn._warnings import warn
from multibn.engine.running import PopulationEstimator, running_variance
from multibn.flax_backend.nnx import BatchNorm, Population


def update_bn_stats(
    model: nnx.Module,
    data_loader: Iterable[Any],
    *,
    num_iters: int | None = None,
    forward_fn: Callable[[Any, Any], object] | None = None,
) -> None:
    """Replace the running statistics of a model's batch norms by statistics of the loader's data.

    The statistics cover all elements of each layer's inputs, in all batches and on all devices
    (Wu & Johnson, 2021, arXiv:2105.07576, section 3). Batches may differ in size. During the pass,
    layers normalize by batch statistics, as in training. Only `mean` and `var` change: other state
    is restored. After an exception, all state is restored.

    Parameters
    ----------
    model
        The model, whose `BatchNorm` layers with `use_running_average=False` are updated: call
        `convert_batch_norm(model)` and `model.train()` first.
    data_loader
        Any iterable of batches.
    num_iters
        Stop after this number of batches; None for all batches.
    forward_fn
        Called as `forward_fn(model, batch)`. Default: nnx.jit of `model(batch)`, or of
        `model(batch[0])` for a tuple or list. Layers with an `axis_name` need a `forward_fn` that
        binds the axis, for example with nnx.shard_map.

    Raises
    ------
    TypeError, ValueError
        If `num_iters` is not a positive int, or if there is no batch.

    Warns
    -----
    UserWarning
        If there is no layer to update, or if a layer had no input and is not updated.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from multibn.flax import BatchNorm, update_bn_stats
    >>> layer = BatchNorm(1, rngs=nnx.Rngs(0))
    >>> update_bn_stats(layer, [jnp.asarray([[1.0], [3.0]]), jnp.asarray([[5.0], [7.0], [9.0]])])
    >>> print(layer.mean[...], layer.var[...])
    [5.] [8.]
    """
    check_int("num_iters", num_iters, none="all batches")
    layers = {
        ".".join(map(str, path)): layer
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, BatchNorm) and not layer.use_running_average
    }
    if not layers:
        warn(
            "`model` has no multibn.flax.BatchNorm in training mode: nothing to update. Call "
            "convert_batch_norm(model) and model.train() first."
        )
        return
    forward = forward_fn or nnx.jit(lambda model, x: model(x))
    before = jax.tree.map(lambda v: v, nnx.state(model))  # a copy that refers to the same arrays
    num_batches = 0
    try:
        for layer in layers.values():
            length = wire.forward_payload(layer.num_features)
            with jax.enable_x64(True):
                layer.population = Population(jnp.zeros(length, jnp.float64))
        for batch in islice(data_loader, num_iters):
            has_labels = forward_fn is None and type(batch) in (tuple, list)
            forward(model, batch[0] if has_labels else batch)
            num_batches += 1
        sums = {path: np.asarray(layer.population[...]) for path, layer in layers.items()}
    finally:
        for layer in layers.values():
            if hasattr(layer, "population"):
                del layer.population
        nnx.update(model, before)
    if not num_batches:
        raise ValueError(
            "`data_loader` must have a batch: got none. An iterator can be used only once."
        )
    for path, layer in layers.items():
        estimator = PopulationEstimator(np.zeros(layer.num_features))
        estimator.add(sums[path])
        stats = estimator.compute()
        if not stats.count:
            warn(f"{path or 'the layer'} had no input: its running statistics are not updated.")
            continue
        var = running_variance(stats, local_count=stats.count, convention=layer.running_var)
        for variable, new in ((layer.mean, stats.mean), (layer.var, var)):
            old = variable[...]
            variable[...] = jax.device_put(new.astype(old.dtype), old.sharding)
