"""What a call refuses, where JAX traces; and batches that are not finite."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from multibn.flax import BatchNorm, convert_batch_norm, linen, sync_batch_norm
from tests.flax_backend import NUM_DEVICES
from tests.flax_backend.devices_layers import ALL, MESH, SPLIT

X = jnp.ones((4, 5, 3))


def sharded(function: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
    return jax.shard_map(function, mesh=MESH, in_specs=SPLIT, out_specs=SPLIT, **options)


def layer(**options: Any) -> Any:
    return BatchNorm(3, rngs=nnx.Rngs(0), **options)


def norm(x: Any, **options: Any) -> Any:
    return sync_batch_norm(x, jnp.ones(3), **options)[0]


def given(**options: Any) -> Callable[[Any], Any]:
    return partial(norm, **options)


def along(axis: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda x: sync_batch_norm(x, axis=axis, **options)[0]


def axis(name: str, groups: Any = None) -> Callable[[Any], Any]:
    return partial(norm, axis_name=name, axis_index_groups=groups)


def check_refused_inputs() -> None:
    mask = jnp.ones((4, 5), bool)
    groups, four = [[0, 1], [2, 3]], jnp.ones(4, int)
    wrong_axes: list[Any] = [3, (), [], (0, 1, 2)]
    refused: list[Any] = [
        ("`axis_name` must be an axis that .*: got 'other'", axis("other"), X),
        (r"`axis_name` must be .*\['devices'\] is bound.* cover the whole sharded array",
         sharded(axis("other")), X),
        ("`mask` must have shape .*expand_dims", given(mask=mask), X),
        (r"`mask` must have .*one channel: mask\[:, :, :1\]", given(mask=X > 0), X),
        (r"`mask` must have .*one channel: mask\[:, :1, :\]", along(1, mask=X > 0), X),
        (r"`mask` must have the shape .*got \(4, 4\)", given(mask=mask[:, :4, None]), X),
        (r"`mask` must have dtype bool", given(mask=X[..., :1]), X),
        (r"cannot be passed together", given(mask=mask[..., None], lengths=four), X),
        (r"`lengths` must have shape \(4,\)", given(lengths=jnp.ones(5, int)), X),
        (r"`lengths` needs .* N samples and of L elements .* axis -1: got shape \(4, 3\)",
         given(lengths=four), X[:, 0]),
        (r"`lengths` needs .* channels' axis 1: got", along(1, lengths=four), X[:, 0]),
        (r"`lengths` must be integers: got dtype float32", given(lengths=four * 1.0), X),
        *(
            (f"`{name}` must be an array: got 'no'", given(**{name: "no"}), X)
            for name in ("bias", "mask", "lengths")
        ),
        (r"`scale` must be an array: got \[1, 'z'\]", lambda x: sync_batch_norm(x, [1, "z"]), X),
        (r"`scale`, `bias` and .* shape \(2,\), that of axis -1 .*: got \(3,\)", norm, X[..., :2]),
        (r"must have shape \(2,\).* with num_features=2", layer(), X[..., :2]),
        *((r"`axis` must name one .*: got", along(k), X) for k in wrong_axes),
        (r"`x` must have elements: got shape", norm, X[:0]),
        (r"`x` must have elements", sharded(axis("devices")), X[:0]),
        (r"more than 1 value per channel.* a layer can use its", norm, X[:1, :1]),
        (r"more than 1 value per channel",
         sharded(axis("devices", [[1, 2, 3], [0]]), check_vma=False), X[:, :1]),
        (r"real floating-point dtype: got int32", norm, X.astype(int)),
        (r"real floating-point dtype: got int32", layer(), X.astype(int)),
        (r"real floating-point dtype: got complex64", norm, X + 1j),
        (r"`axis_index_groups` needs .*check_vma=False.*: got .* under .*check_vma=True",
         sharded(axis("devices", groups)), X),
        (r"`axis_index_groups` must have each of the 4 .* exactly once",
         sharded(axis("devices", [[0]])), X),
    ]  # fmt: skip
    for message, function, x in refused:
        for call in (function, jax.jit(function)):
            with pytest.raises((TypeError, ValueError), match=message):
                call(x)


def check_lists_of_axes_are_tuples() -> None:
    x = X.at[1, 0].set(3.0)
    assert (along([0, 2])(x) == along((0, 2))(x)).all()
    assert (layer(axis=[-1])(x) == layer()(x)).all()
    named = jax.vmap(given(axis_name=["a"]), axis_name="a")(x)
    np.testing.assert_allclose(named, norm(x), rtol=0, atol=1e-6)


def check_an_axis_of_one_device() -> None:
    """A mesh whose data axis has size 1, and devices with channels of their own; or one device."""
    x = np.random.default_rng(0).normal(3, 2, (4, 5, 12)).astype(np.float32)
    for shape in ((1, NUM_DEVICES), (1, 1)):
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=auto)
        split = PartitionSpec("data", None, "model")
        y = jax.shard_map(
            lambda x: sync_batch_norm(x, axis_name="data")[0],
            **{"mesh": mesh, "in_specs": split, "out_specs": split},
        )
        np.testing.assert_allclose(y(x), sync_batch_norm(x)[0], rtol=0, atol=1e-6)


def check_refused_options() -> None:
    refused: dict[str, tuple[str, list[Any]]] = {
        "weighting": ("one of 'element', 'sample', 'rank'", ["batch", 3]),
        "running_var": ("one of 'unbiased_global', .*", ["unbiased", None]),
        "momentum": (r"a number|in \[0, 1\]", [1.5, "0.9", None]),
        "epsilon": (r"a number|in \[1.18e-38, inf\)", [0.0, "1e-5", None]),
        "axis": ("an int or a tuple of ints", ["channels", 1.0, None, (0, None)]),
        "axis_name": ("hashable", [{"devices"}, ("devices", set())]),
        "axis_index_groups": ("lists of ints, or None", [3, "01", (0, 1), ((0, 1), ("2", 3))]),
        "sum_dtype": ("float32 or float64", ["foo", 3, jnp.bfloat16]),
    }
    for name, (wanted, values) in refused.items():
        for value in values:
            options = {name: value}
            got = f"`{name}` must be (?:{wanted}): got {re.escape(repr(value))}"
            with pytest.raises((TypeError, ValueError), match=got):
                layer(**options)
            model = linen.BatchNorm(use_running_average=False, **options)
            with pytest.raises((TypeError, ValueError), match=got):
                model.init(jax.random.key(0), X)
            for function in (partial(convert_batch_norm, layer()), partial(sync_batch_norm, X)):
                if name in inspect.signature(function).parameters:
                    with pytest.raises((TypeError, ValueError), match=got):
                        function(**options)
    with pytest.raises(TypeError, match="`num_features` must be an int: got '3' of type str"):
        BatchNorm("3", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    for x in ("x", None):
        with pytest.raises(TypeError, match=f"`x` must be an array: got {x!r}"):
            layer()(x)
    with pytest.raises(ValueError, match=r"`use_running_average` must be a bool .* Call model"):
        (bn := layer(use_running_average=None))(X)
    init = partial(linen.BatchNorm().init, jax.random.key(0))
    with pytest.raises(TypeError, match="`mask` must be an array: got 'no'"):
        init(X, use_running_average=False, mask="no")
    for call in (layer(), init):
        with pytest.raises(TypeError, match="`use_running_average` must be a bool: got 'no' of"):
            call(X, use_running_average="no")
    bn.train()
    bn(X)


def functional_step(graph: Any, state: Any, x: Any) -> Any:
    bn = nnx.merge(graph, state)
    return bn(x), nnx.state(bn, nnx.BatchStat)


def check_batches_that_are_not_finite() -> None:
    """No statistics move; without a trace, an error tells."""
    for wrong in (np.nan, 1e300):
        with jax.enable_x64(wrong == 1e300):
            x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3))).at[5, 1].set(wrong)
            for name in ("devices",) if wrong == 1e300 else (None, "devices"):
                graph, state = nnx.split(layer(axis_name=name))
                step: Any = partial(functional_step, graph)
                if name:
                    specs = {"in_specs": (ALL, SPLIT), "out_specs": (SPLIT, ALL)}
                    step = jax.shard_map(step, mesh=MESH, **specs)
                y, moved = jax.jit(step)(state, x)
                assert jnp.isnan(y).all()
                assert (moved["mean"][...] == 0).all()
                assert (moved["var"][...] == 1).all()
            bn = layer()
            message = "statistics are not finite: the input contains"
            with pytest.raises(FloatingPointError, match=message):
                bn(x)
            assert (bn.mean[...] == 0).all()
    half = layer(dtype=jnp.float16)
    assert jnp.isnan(half(jnp.ones((4, 3), jnp.float16).at[0].set(jnp.inf))).all()
    assert (half.var[...] == 1).all()


def check_an_infinite_bias_is_an_infinite_output() -> None:
    bias = jnp.asarray([1.0, jnp.inf, 1.0])
    y = sync_batch_norm(jnp.asarray([[1.0] * 3, [3.0] * 3]), None, bias)[0]
    np.testing.assert_allclose(y, [[0.0, np.inf, 0.0], [2.0, np.inf, 2.0]], rtol=0, atol=1e-4)


def check_masks_that_leave_nothing() -> None:
    bn, mask = layer(), jnp.zeros((4, 5, 1), bool)
    with pytest.raises(ValueError, match="`mask` or `lengths` excludes every element"):
        bn(X, mask=mask)
    y = nnx.jit(lambda bn, x: bn(x, mask=mask))(bn, X * jnp.nan)
    assert (y == 0).all()
    assert (bn.var[...] == 1).all()
