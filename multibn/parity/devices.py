"""Parity of the flax layer: each device of one process gets the batch of one rank."""

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from multibn.parity.cases import CASES, CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Error, _named, compare

AXIS = "devices"


def measure(
    _: Any, cases: Sequence[str], size: int, axis_name: str | None = AXIS, over: str = "shard_map"
) -> list[Error]:
    """Return the errors on `size` devices, which share statistics if they have an `axis_name`.

    `over` is "shard_map" or "pmap".
    """
    # JAX reads these variables on import: `size` CPU devices.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={size}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    errors = []
    for case in (case for case in CASES if case.name in cases):
        with jax.enable_x64(case.dtype == "float64"):
            found = train(case, size, axis_name, over)
        errors += [e for rank, a in enumerate(found) for e in compare("flax", case, a, rank, size)]
    return errors


def train(case: Case, size: int, axis_name: str | None, over: str) -> list[Arrays]:
    """Train a layer on `size` devices, and return the arrays of each device."""
    weight, bias = case.parameters()
    running = np.zeros((size, CHANNELS), weight.dtype), np.ones((size, CHANNELS), weight.dtype)
    found: list[Arrays] = [{} for _ in range(size)]
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        decay = 1 - (1 / (step + 1) if case.cumulative else MOMENTUM)
        shape = tuple(map(max, *(x.shape for x in xs), xs[0].shape))
        has_mask = case.masked_value is not None or any(x.shape != shape for x in xs)
        x, dy, mask = (np.stack([_padded(a, shape) for a in each]) for each in (xs, dys, masks))
        repeated = (np.broadcast_to(v, (size, CHANNELS)) for v in (weight, bias))
        arguments = x, dy, mask[:, :, None] if has_mask else None, *repeated, *running
        arrays = map(np.asarray, _program(case, decay, size, axis_name, over)(*arguments))
        y, dx, dweight, dbias, *running = arrays  # type: ignore[assignment]
        means = [v.mean(0, dtype=np.float64) for v in (dweight, dbias)]
        for rank, part in enumerate(found):
            unpad = tuple(map(slice, xs[rank].shape))
            y_and_dx = y[rank][unpad], dx[rank][unpad]
            part |= _named(step, *y_and_dx, *means, *(v[rank] for v in running))
    for rank, part in enumerate(found):
        layer = _layer(case, 1.0, axis_name, weight, bias, running[0][rank], running[1][rank])
        eval_mask = None if case.masked_value is None else np.expand_dims(masks[rank], 1)
        part[f"{step}/eval"] = np.asarray(layer(xs[rank], use_running_average=True, mask=eval_mask))
    return found


@lru_cache(4)
def _program(case: Case, decay: float, size: int, axis_name: str | None, over: str) -> Any:
    """Compile a training step on all devices."""
    import jax

    run = partial(_step, case, decay, axis_name)
    if over == "pmap":
        return jax.pmap(run, axis_name=AXIS)
    mesh = jax.make_mesh((size,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(AXIS)
    row = jax.vmap(run)  # each device has a leading axis of length 1
    return jax.jit(jax.shard_map(row, mesh=mesh, in_specs=spec, out_specs=spec))


def _step(case: Case, decay: float, axis_name: str | None, *arrays: Any) -> tuple[Any, ...]:
    """Train one step on one device; return output, gradients and running statistics."""
    import jax

    x, dy, mask, weight, bias, *running = arrays

    def loss(x: Any, weight: Any, bias: Any) -> Any:
        layer = _layer(case, decay, axis_name, weight, bias, *running)
        y = layer(x, mask=mask)
        return (y.astype(weight.dtype) * dy).sum(), (y, layer.mean[...], layer.var[...])

    call = jax.checkpoint(loss) if case.recompute else loss
    gradients, (y, *moved) = jax.grad(call, (0, 1, 2), has_aux=True)(x, weight, bias)
    return y, *gradients, *moved


def _layer(case: Case, decay: float, axis_name: str | None, *state: Any) -> Any:
    """Build a layer; `state` is scale, bias, mean and variance."""
    import jax.numpy as jnp
    from flax import nnx

    from multibn.flax_backend import BatchNorm

    layer = BatchNorm(
        CHANNELS,
        axis=1,
        momentum=decay,
        epsilon=EPS,
        dtype=case.dtype,
        axis_name=axis_name,
        weighting=case.weighting,
        running_var=case.running_var,
        rngs=nnx.Rngs(0),
    )
    scale, bias, mean, var = map(jnp.asarray, state)
    layer.scale, layer.bias = nnx.Param(scale), nnx.Param(bias)
    layer.mean, layer.var = nnx.BatchStat(mean), nnx.BatchStat(var)
    return layer


def _padded(a: Array, shape: tuple[int, ...]) -> Array:
    """Pad an activation, or a mask without channels, with zeros at the end of each axis."""
    wanted = shape if a.ndim == len(shape) else (shape[0], *shape[2:])
    return np.pad(a, [(0, n - k) for n, k in zip(wanted, a.shape, strict=True)])
