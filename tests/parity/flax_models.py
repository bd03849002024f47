"""A small model in flax, beside the same in torch or in Chainer, for `multibn parity --model`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from multibn.flax import BatchNorm
from multibn.flax.linen import BatchNorm as LinenBatchNorm
from tests.helpers import models


class FlaxModel(nnx.Module):
    """The models of tests.helpers.models; the input has its channels where torch has them."""

    def __init__(self, **options: Any) -> None:
        rngs = nnx.Rngs(0)
        given: dict[str, Any] = {"momentum": 0.9, "running_var": "unbiased_global", **options}
        self.conv = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs)
        self.bn = BatchNorm(4, **given, rngs=rngs)
        self.fc = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = jax.nn.relu(self.bn(self.conv(jnp.moveaxis(x, 1, -1))))
        return self.fc(y.mean((1, 2)))


class LinenModel(linen.Module):
    """The same model; `options` are those of its batch norm."""

    options: Any

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        given = {"momentum": 0.9, "running_var": "unbiased_global", **self.options}
        y = linen.Conv(4, (3, 3), padding="VALID", name="conv")(jnp.moveaxis(x, 1, -1))
        y = LinenBatchNorm(use_running_average=not train, **given, name="bn")(y)
        return linen.Dense(2, name="fc")(jax.nn.relu(y).mean((1, 2)))


def linen_model(**options: Any) -> LinenModel:
    return LinenModel(options)


def pair(model: Callable[..., Any] = FlaxModel, **options: Any) -> tuple[Any, Any, Any]:
    torch_model, _, x = models.pair()
    return torch_model, model(**options), x


def chainer_pair(model: Callable[..., Any] = FlaxModel) -> tuple[Any, Any, Any]:
    _, chainer_model, x = models.pair()
    return chainer_model, model(), x


def unlike(model: Callable[..., Any] = FlaxModel) -> tuple[Any, Any, Any]:
    torch_model, flax_model, x = pair(model)
    torch_model.fc.register_forward_hook(lambda module, args, y: 1.5 * y)
    return torch_model, flax_model, x


def of_two_kinds() -> tuple[Any, Any, Any]:
    return FlaxModel(), linen_model(), models.pair()[2]


_OF_NNX: Any = pair, chainer_pair, unlike
linen_pair, linen_chainer_pair, linen_unlike = (partial(of, linen_model) for of in _OF_NNX)
of_other_options, linen_of_other_options = (
    partial(of, momentum=0.99, epsilon=1e-3, use_bias=False, running_var="biased")
    for of in (pair, linen_pair)
)
