"""The transformations of JAX, on one device and over the devices of a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from multibn.flax import BatchNorm, sync_batch_norm
from tests.flax_backend.devices_layers import ALL, MESH, SPLIT

_rng = np.random.default_rng(1)
X, T, SCALE = (_rng.normal(size=shape).astype(np.float32) for shape in ((8, 3, 2), (8, 3, 2), (2,)))


def oracle(x: Any, scale: Any) -> Any:
    """The loss of `loss`, in other words, and float64 where the arrays are."""
    mean = x.mean((0, 1))
    var = ((x - mean) ** 2).mean((0, 1))
    return (((x - mean) / jnp.sqrt(var + 1e-5) * scale) ** 3 * T).sum()


def loss(x: Any, scale: Any) -> Any:
    return (sync_batch_norm(x, scale)[0] ** 3 * T).sum()


def loss_of_shards(x: Any, scale: Any) -> Any:
    """The same loss, of which each device has a part."""

    def part(x: Any, scale: Any, t: Any) -> Any:
        y, _ = sync_batch_norm(x, scale, axis_name="devices")
        return jax.lax.psum((y**3 * t).sum(), "devices")

    return jax.shard_map(part, mesh=MESH, in_specs=(SPLIT, ALL, SPLIT), out_specs=ALL)(
        x, scale, jnp.asarray(T)
    )


def in_float64(function: Any, *arguments: Any) -> Any:
    with jax.enable_x64(True):
        return function(*(jnp.asarray(a, jnp.float64) for a in arguments))


def assert_near(found: Any, wanted: Any, bound: float = 3e-6) -> None:
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        got, right = (np.asarray(v, np.float64) for v in (got, right))
        assert got.shape == right.shape
        error = np.abs(got - right).max() / (np.abs(right).max() or 1.0)
        assert error < bound, error


def check_derivatives() -> None:
    """The derivatives of both orders, tangents, and those of a checkpoint."""
    wrt: Any = {"argnums": (0, 1)}
    gradient = in_float64(jax.grad(oracle, **wrt), X, SCALE)
    hessian = in_float64(jax.hessian(oracle, **wrt), X, SCALE)
    tangent = in_float64(lambda *a: jax.jvp(oracle, a, a), X, SCALE)
    for function in (loss, loss_of_shards):
        for first in (jax.grad(function, **wrt), jax.grad(jax.checkpoint(function), **wrt),
                      jax.jacfwd(function, **wrt)):  # fmt: skip
            assert_near(jax.jit(first)(X, SCALE), gradient)
        assert_near(jax.jit(lambda *a, f=function: jax.jvp(f, a, a))(X, SCALE), tangent)
    assert_near(jax.grad(jax.checkpoint(loss), **wrt)(X, SCALE), gradient)
    assert_near(jax.jit(jax.hessian(loss, **wrt))(X, SCALE), hessian, 1e-5)
    found = in_float64(jax.jit(jax.hessian(loss_of_shards, **wrt)), X, SCALE)
    assert_near(found, hessian, 1e-11)


def check_vmap() -> None:
    several = np.stack([X, 2 * X + 1, X**2])
    right = np.stack([in_float64(jax.grad(oracle), x, SCALE) for x in several])
    for function in (loss, loss_of_shards):
        grads = jax.vmap(jax.grad(function), in_axes=(0, None))
        assert_near(jax.jit(grads)(several, SCALE), right)
    # An axis of vmap shares, too.
    y = jax.vmap(lambda x: sync_batch_norm(x, axis_name="v")[0], axis_name="v")(several)
    assert_near(y.reshape(-1, 2), sync_batch_norm(jnp.asarray(several).reshape(-1, 2))[0])


def check_scan() -> None:
    """A layer that runs again on its own output, as its running statistics go along."""

    def run(x: Any, scale: Any) -> Any:
        layer = BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)

        def step(carry: Any, _: Any) -> Any:
            state, x = carry
            layer = nnx.merge(graph, state)
            layer.scale[...] = scale
            x = layer(x) ** 3
            return (nnx.state(layer), x), layer.mean[...]

        (state, x), means = jax.lax.scan(step, (state, x), length=3)
        return (x * T).sum(), means

    def right(x: Any, scale: Any) -> Any:
        means, running = [], jnp.zeros(2)
        for _ in range(3):
            mean = x.mean((0, 1))
            running = running + 0.5 * (mean - running)
            means.append(running)
            var = ((x - mean) ** 2).mean((0, 1))
            x = ((x - mean) / jnp.sqrt(var + 1e-5) * scale) ** 3
        return (x * T).sum(), jnp.stack(means)

    found = jax.jit(jax.value_and_grad(run, has_aux=True))(X, SCALE)
    assert_near(found, in_float64(jax.value_and_grad(right, has_aux=True), X, SCALE), 2e-5)
