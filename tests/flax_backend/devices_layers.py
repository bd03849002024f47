"""Layers over the devices of a mesh: the numbers of one process, and how many messages."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from multibn.flax import sync_batch_norm
from multibn.parity import oracle
from tests.flax_backend import NUM_DEVICES

ALL, SPLIT = PartitionSpec(), PartitionSpec("devices")
MESH = jax.make_mesh((NUM_DEVICES,), ("devices",), axis_types=(AxisType.Auto,))
SHAPE = (NUM_DEVICES, 4, 3, 5, 6)  # devices, N, H, W, C


class Data:
    """The shards of a batch, and what one process makes of them."""

    def __init__(self, dtype: Any, shards: str, mean: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        wide = "float64" if dtype == "float64" else "float32"
        self.x, self.dy = (rng.normal(size=SHAPE) * 2 for _ in range(2))
        self.x = np.array(jnp.asarray(self.x + mean + rng.normal(size=SHAPE[-1]), dtype), wide)
        self.dy = np.array(jnp.asarray(self.dy, dtype), wide)
        self.scale, self.bias = (rng.normal(1, 0.3, SHAPE[-1]).astype(wide) for _ in range(2))
        mask = np.ones(SHAPE[:-1], bool)
        if shards != "even":
            mask = rng.random(mask.shape) < np.linspace(0.2, 0.9, NUM_DEVICES)[:, None, None, None]
            self.x[~mask] = np.nan
        if shards == "empty":
            mask[2] = False
        self.mask = None if shards == "even" else mask[..., None]
        xs, dys = (list(np.moveaxis(v, -1, 2)) for v in (self.x, self.dy))
        options: Any = {"eps": 1e-5, "masks": list(mask)}
        found = oracle.batch_norm(xs, dys, self.scale, self.bias, **options)
        y, dx = (np.moveaxis(np.stack(v), 2, -1) for v in (found.y, found.dx))
        self.wanted = y, dx, found.dweight, found.dbias, found.mean, found.var

    def errors(self, found: list[Any]) -> list[float]:
        """The errors of what `shared` gives."""
        return list(map(oracle.relative_error, found, self.wanted))


def step(arguments: Any, axis_name: str | None, **options: Any) -> tuple[Any, ...]:
    """The output, all gradients and the statistics of a shard."""
    x, dy, scale, bias, mask = arguments

    def loss(*inputs: Any) -> Any:
        y, batch = sync_batch_norm(*inputs, axis_name=axis_name, mask=mask, **options)
        return (y * dy).sum(), (y, batch)

    gradients, (y, batch) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, scale, bias)
    return y, *gradients, batch.mean, batch.var


def shared(over: str, data: Data, dtype: Any, **options: Any) -> tuple[list[Any], int]:
    """What `step` gives over all devices, and the all-reduces of the compiled program."""
    arrays = [jnp.asarray(v, dtype) for v in (data.x, data.dy)]
    arrays += [jnp.asarray(v) for v in (data.scale, data.bias)]
    has_mask = data.mask is not None
    mask = jnp.asarray(data.mask) if has_mask else jnp.ones((NUM_DEVICES, 1, 1, 1, 1), bool)

    def run(x: Any, dy: Any, scale: Any, bias: Any, mask: Any) -> Any:
        name = None if over == "jit" else "devices"
        return step((x, dy, scale, bias, mask if has_mask else None), name, **options)

    if over == "pmap":
        function: Any = jax.pmap(run, axis_name="devices", in_axes=(0, 0, None, None, 0))
        arguments = (*arrays, mask)
        compiled = function.lower(*arguments).compile()
        found = [np.asarray(v, np.float64) for v in compiled(*arguments)]
        found[2:4] = [v.sum(0) for v in found[2:4]]
        found[4:] = [v[0] for v in found[4:]]
    else:
        flat = [v.reshape(-1, *v.shape[2:]) for v in (*arrays[:2], mask)]
        arguments = (*flat[:2], *arrays[2:], flat[2])
        specs = (SPLIT, SPLIT, ALL, ALL, SPLIT)
        if over == "jit":
            function = jax.jit(run)
            arguments = tuple(
                jax.device_put(v, NamedSharding(MESH, s))
                for v, s in zip(arguments, specs, strict=True)
            )
        else:
            outputs = (SPLIT, SPLIT, ALL, ALL, ALL, ALL)
            function = jax.jit(jax.shard_map(run, mesh=MESH, in_specs=specs, out_specs=outputs))
        compiled = function.lower(*arguments).compile()
        found = [np.asarray(v, np.float64) for v in compiled(*arguments)]
        found[:2] = [v.reshape(SHAPE) for v in found[:2]]
    return found, compiled.as_text().count(" all-reduce(")


SHARDS = "even", "uneven", "empty"
BOUNDS = {"float32": 2e-6, "float64": 1e-11, "bfloat16": 2e-2}


def check_numbers_of_one_process() -> None:
    cases = [
        *itertools.product(["shard_map"], SHARDS, ["float32", "float64", "bfloat16"]),
        *itertools.product(["pmap"], SHARDS, ["float32"]),
        *itertools.product(["pmap"], ["empty"], ["float64", "bfloat16"]),
        *itertools.product(["jit"], ["uneven"], ["float32", "float64"]),
    ]
    for case in cases:
        over, shards, dtype = case
        with jax.enable_x64(dtype == "float64"):
            data = Data(dtype, shards)
            found, num_messages = shared(over, data, dtype)
        errors = data.errors(found)
        assert max(errors) < BOUNDS[dtype], (case, errors)
        assert max(errors[4:]) < 1e-7, (case, errors)
        if over != "jit":  # forward, backward, and the mean that float64 takes away first
            assert num_messages == (3 if dtype == "float64" else 2), case


def check_large_means() -> None:
    for mean, dtype, bound in [
        (1e4, "float32", 2e-6),
        (1e4, "float64", 1e-12),
        (1e6, "float64", 3e-11),
    ]:
        with jax.enable_x64(dtype == "float64"):
            data = Data(dtype, "uneven", mean)
            found, _ = shared("shard_map", data, dtype)
        errors = data.errors(found)
        assert max(errors) < bound, (mean, dtype, errors)


def check_sums_in_float32_cost_a_ten_millionth() -> None:
    data = Data("float32", "uneven", 1e4)
    found, _ = shared("shard_map", data, "float32", sum_dtype="float32")
    assert 1e-9 < data.errors(found)[5] < 3e-7
    assert data.errors(found)[0] < 2e-6


def check_arithmetic_on_channels_is_not_repeated_for_each_element() -> None:
    x = jnp.ones((1024, 64))
    for function in (lambda y: y**2, lambda y: y * x):
        loss = lambda x, f=function: f(sync_batch_norm(x)[0]).sum()  # noqa: E731
        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
        loops = [each for each in text.split("\n\n") if "ROOT" in each and "f32[1024,64]" in each]
        loops = [each for each in loops if not each.startswith("ENTRY")]
        repeated = [each.count("= f64[64]{0} multiply(") for each in loops]
        assert len(repeated) > 4
        assert not any(repeated), repeated
