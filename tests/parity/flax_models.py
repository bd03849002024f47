"""A small model in flax, beside the same in torch or in Chainer, for `multibn parity --model`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from multibn.flax import BatchNorm
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


def pair() -> tuple[Any, FlaxModel, Any]:
    torch_model, _, x = models.pair()
    return torch_model, FlaxModel(), x


def chainer_pair() -> tuple[Any, FlaxModel, Any]:
    _, chainer_model, x = models.pair()
    return chainer_model, FlaxModel(), x


def of_other_options() -> tuple[Any, FlaxModel, Any]:
    torch_model, _, x = models.pair()
    return torch_model, FlaxModel(momentum=0.99, epsilon=1e-3, running_var="biased"), x


def unlike() -> tuple[Any, FlaxModel, Any]:
    torch_model, flax_model, x = pair()
    torch_model.fc.register_forward_hook(lambda module, args, y: 1.5 * y)
    return torch_model, flax_model, x
