"""Layers in models: in the place of flax's, converted, with statistics of a loader; parity."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx

from multibn.flax import (
    BatchNorm,
    convert_batch_norm,
    linen,
    revert_batch_norm,
    sync_batch_norm,
    update_bn_stats,
)
from multibn.parity import devices
from tests.flax_backend import NUM_DEVICES
from tests.flax_backend.devices_layers import ALL, MESH, SPLIT
from tests.flax_backend.devices_transforms import assert_near

_rng = np.random.default_rng(2)
X = jnp.asarray(_rng.normal(size=(8, 5, 3)) * 2 + 1, jnp.float32)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
        self.last = nnx.BatchNorm(4, momentum=0.9, epsilon=1e-3, use_scale=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.dropout(nnx.relu(self.last(x)))


def check_nnx_takes_the_place_of_flax() -> None:
    """Equal output, dtypes, state, gradients, and the same again in evaluation."""
    for options, dtype in [
        ({}, jnp.float32),
        ({"dtype": jnp.bfloat16}, jnp.float32),
        ({}, jnp.bfloat16),
        ({"momentum": 0.9, "epsilon": 1e-3, "use_bias": False, "axis": 1}, jnp.float32),
    ]:
        x, size = X.astype(dtype), 5 if "axis" in options else 3
        layers = [kind(size, rngs=nnx.Rngs(0), **options) for kind in (nnx.BatchNorm, BatchNorm)]
        wanted, got = ([layer(x), layer(x, use_running_average=True)] for layer in layers)
        bound = 2e-2 if jnp.bfloat16 in (dtype, options.get("dtype")) else 2e-6
        assert [y.dtype for y in got] == [y.dtype for y in wanted]
        assert_near(got, wanted, bound)
        states = [nnx.state(layer) for layer in layers]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
        assert_near(states[1], states[0], bound)
        grads = [
            nnx.grad(lambda m, x: (m(x) ** 3).sum())(layer, X.astype(dtype)) for layer in layers
        ]
        assert_near(grads[1], grads[0], 5 * bound)


def check_linen_takes_the_place_of_flax() -> None:
    class Net(flax_linen.Module):
        kind: Any

        @flax_linen.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = flax_linen.Dense(4)(x)
            x = self.kind(use_running_average=not train, momentum=0.9)(x) + 1
            return self.kind(use_running_average=not train, axis_name="devices")(
                x, mask=x[..., :1] < 9
            )

    key, found = jax.random.key(0), []
    for kind in (flax_linen.BatchNorm, linen.BatchNorm):
        net = Net(kind)
        variables = net.init(key, X[:1, :1], train=True)  # one value, and no axis

        def step(variables: Any, x: Any, net: Any = net) -> Any:
            return net.apply(variables, x, train=True, mutable=["batch_stats"])

        y, moved = jax.shard_map(step, mesh=MESH, in_specs=(ALL, ALL), out_specs=(ALL, ALL))(
            variables, X
        )
        found.append((variables, y, moved, net.apply(variables | moved, X, train=False)))
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    assert_near(found[1], found[0], 5e-6)


def check_linen_over_devices_with_lengths() -> None:
    lengths = jnp.asarray([5, 1, 0, 4, 2, 0, 0, 3])
    net = linen.BatchNorm(
        use_running_average=False, axis_name="devices", running_var="unbiased_global"
    )
    variables = net.init(jax.random.key(0), X)

    def step(x: Any, lengths: Any) -> Any:
        return net.apply(variables, x, lengths=lengths, mutable=["batch_stats"])

    specs = {"in_specs": (SPLIT, SPLIT), "out_specs": (SPLIT, ALL)}
    y, moved = jax.shard_map(step, mesh=MESH, **specs)(X, lengths)
    rows = np.concatenate([np.asarray(x[:n], float) for x, n in zip(X, lengths, strict=True)])
    assert_near(y[0], (rows[:5] - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5))
    assert (y[1, 1:] == 0).all()
    wanted = {"mean": 0.01 * rows.mean(0), "var": 0.99 + 0.01 * rows.var(0, ddof=1)}
    assert_near(moved["batch_stats"], wanted)


def check_groups_and_conventions() -> None:
    """The ends of a mesh share on their own; each device's unbiased variance is its own."""
    groups = [[0, 3], [1, 2]]
    x = jnp.asarray(_rng.normal(size=(8, 3)), jnp.float32)

    def step(x: Any) -> Any:
        layer = BatchNorm(
            3,
            axis_name="devices",
            axis_index_groups=groups,
            momentum=0.0,
            running_var="unbiased_local",
            rngs=nnx.Rngs(0),
        )
        return layer(x), layer.var[...][None]

    y, var = jax.shard_map(step, mesh=MESH, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)(x)
    ends = np.asarray(x, float)[[0, 1, 6, 7]]
    assert_near(y[jnp.asarray([0, 1, 6, 7])], (ends - ends.mean(0)) / np.sqrt(ends.var(0) + 1e-5))
    assert_near(var[0], ends.var(0) * 2)


def check_conversion_and_the_way_back() -> None:
    model = Model()
    model.eval()
    before, state = model(X), jax.tree.structure(nnx.state(model))
    assert convert_batch_norm(model, "devices", running_var="unbiased_global") is model
    assert type(model.last) is type(model.layers[1]) is BatchNorm
    assert isinstance(model.last, nnx.BatchNorm)
    assert (model.last.axis_name, model.last.running_var) == ("devices", "unbiased_global")
    assert_near(model(X), before)
    assert jax.tree.structure(nnx.state(model)) == state
    convert_batch_norm(model, weighting="rank")  # the axis stays
    assert (model.last.axis_name, model.last.weighting) == ("devices", "rank")
    groups = [[0, 1], [2, 3]]
    convert_batch_norm(model, axis_index_groups=groups)  # so does it here
    assert (model.last.axis_name, model.last.axis_index_groups) == ("devices", groups)
    convert_batch_norm(model)
    assert model.last.axis_index_groups == groups
    convert_batch_norm(model, "devices")
    assert model.last.axis_index_groups is None
    assert type(revert_batch_norm(model).last) is nnx.BatchNorm
    assert vars(model.last).keys() == vars(nnx.BatchNorm(4, rngs=nnx.Rngs(0))).keys()
    assert (model(X) == before).all()


def check_conversion_tells_what_stays() -> None:
    class Own(nnx.BatchNorm):
        pass

    own = nnx.Sequential(Own(3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    message = r"1 layer.s. are not converted: layers\.0 .the class .*Own is a subclass of flax"
    with pytest.warns(UserWarning, match=message):
        convert_batch_norm(own)
    assert type(own.layers[1]) is BatchNorm
    message = "`model` has no flax.nnx.BatchNorm: nothing to convert. Pass"
    with pytest.warns(UserWarning, match=message):
        convert_batch_norm(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="`weighting` must be one of"):
        convert_batch_norm(Model(), weighting="mean")  # type: ignore[arg-type]


def check_statistics_of_a_loader() -> None:
    """Exact over batches of unequal sizes, over devices too, where nothing else has changed."""
    batches = [jnp.asarray(_rng.normal(size=(n, 3)) + n, jnp.float32) for n in (8, 4, 12)]
    rows = np.concatenate(batches).astype(float)

    def forward(model: Any, x: Any) -> Any:
        return nnx.shard_map(lambda m, x: m(x), mesh=MESH, in_specs=(ALL, SPLIT), out_specs=SPLIT)(
            model, x
        )

    for name, options in (None, {}), ("devices", {"forward_fn": nnx.jit(forward)}):
        model = convert_batch_norm(Model(), name)
        others = jax.tree.map(np.array, nnx.state(model, nnx.Any(nnx.Param, nnx.RngCount)))
        loader = batches if name else [(x, None) for x in batches]
        update_bn_stats(model, loader, **options)
        linear = model.layers[0]
        hidden = rows @ np.asarray(linear.kernel[...], float) + np.asarray(linear.bias[...], float)
        assert_near(model.layers[1].mean[...], hidden.mean(0), 1e-6)
        assert_near(model.layers[1].var[...], hidden.var(0), 1e-6)
        left = nnx.state(model, nnx.Any(nnx.Param, nnx.RngCount))
        assert jax.tree.all(jax.tree.map(np.array_equal, left, others))
        assert not hasattr(model.last, "population")


def check_a_loader_that_fails_changes_nothing() -> None:
    model = convert_batch_norm(Model())

    def batches() -> Any:
        yield X[:, 0]
        raise KeyError("of the loader")

    with pytest.raises(KeyError, match="of the loader"):
        update_bn_stats(model, batches())
    assert (model.last.mean[...] == 0).all()
    assert not hasattr(model.last, "population")
    with pytest.raises(ValueError, match="`data_loader` must have a batch: got none"):
        update_bn_stats(model, [])
    with pytest.raises(ValueError, match="`num_iters` must be positive, or None for all batches"):
        update_bn_stats(model, [X], num_iters=0)
    message = r"last had no input: its running statistics are not updated"
    with pytest.warns(UserWarning, match=message):
        update_bn_stats(model, [X[:, 0]], forward_fn=lambda m, x: m.layers[1](m.layers[0](x)))
    model.eval()
    with pytest.warns(UserWarning, match="`model` has no multibn.flax.BatchNorm in training mode"):
        update_bn_stats(model, [X])


def check_beside_flax() -> None:
    """What flax's layer gives in the same run, where it gives something else."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 30, 3)) * 2
    mask = rng.random((8, 30, 1)) < np.linspace(0.05, 0.95, 8)[:, None, None]
    wanted = (x - x[mask[..., 0]].mean(0)) / np.sqrt(x[mask[..., 0]].var(0) + 1e-5) * mask
    errors = {}
    for kind in (nnx.BatchNorm, BatchNorm):

        def masked(x: Any, mask: Any, kind: Any = kind) -> Any:
            return kind(3, axis_name="devices", rngs=nnx.Rngs(0))(x, mask=mask) * mask

        y = jax.shard_map(masked, mesh=MESH, in_specs=(SPLIT, SPLIT), out_specs=SPLIT)
        far = jnp.asarray(x + 1e4, jnp.float32)
        of_far = np.asarray(far, float)
        right = (of_far - of_far.mean((0, 1))) / np.sqrt(of_far.var((0, 1)) + 1e-5)
        layer = kind(3, rngs=nnx.Rngs(0))
        step = nnx.jit(lambda layer, x: layer(x))
        step(layer, jnp.asarray(x).at[0, 0].set(jnp.inf))
        errors[kind] = (
            np.abs(y(jnp.asarray(x, jnp.float32), jnp.asarray(mask)) - wanted).max(),
            np.abs(kind(3, rngs=nnx.Rngs(0))(far) - right).max(),
            bool(jnp.isfinite(layer.var[...]).all()),
        )
    assert errors[BatchNorm][0] < 2e-6
    assert errors[BatchNorm][1] < 2e-6
    assert errors[BatchNorm][2]
    assert errors[nnx.BatchNorm][0] > 1e-2
    assert errors[nnx.BatchNorm][1] > 1
    assert not errors[nnx.BatchNorm][2]


def check_arrays_that_explicitly_say_where_they_are() -> None:
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Explicit,))
    right = sync_batch_norm(X)[0]
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, SPLIT))
        assert_near(jax.jit(lambda x: sync_batch_norm(x, jnp.ones(3))[0])(x), right)
    shards = jax.device_put(X, jax.sharding.NamedSharding(MESH, SPLIT))
    assert_near(sync_batch_norm(shards)[0], right)


CASES = ["uneven-float64", "empty-rank", "float16", "local-count-var"]
CASES += ["masked-sample-weights", "masked-rank-weights"]


def check_cases_of_the_parity_command() -> None:
    for over, names in (("shard_map", CASES), ("pmap", CASES[1:2])):
        errors = devices.measure(None, names, NUM_DEVICES, over=over)
        assert {e.case for e in errors} == {*names}
        assert max(errors).ratio < 1, max(errors)


def check_devices_that_share_nothing_are_broken() -> None:
    worst = max(devices.measure(None, ["float32"], NUM_DEVICES, axis_name=None))
    assert worst.ratio > 1e3, worst
