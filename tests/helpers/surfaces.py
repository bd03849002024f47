"""The layer of each framework behind one small interface, in NumPy's terms."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from multibn.communicators import Communicator
from tests.helpers.reference import Array


class Step(NamedTuple):
    """One rank's numbers of a training step; the parameters' gradients are sums over all ranks."""

    y: Array
    dx: Array
    dweight: Array
    dbias: Array


class Surface(Protocol):
    initial_var: float

    def train(self, x: Array, dy: Array) -> Step: ...
    def evaluate(self, x: Array) -> Array: ...
    def running(self) -> tuple[Array, Array]: ...


class TorchSurface:
    initial_var = 1.0

    def __init__(
        self,
        weight: Array,
        bias: Array,
        communicator: Communicator,
        *,
        eps: float,
        momentum: float,
        **conventions: Any,
    ) -> None:
        import torch

        from multibn.torch_backend import SyncBatchNorm

        self.torch = torch
        self.communicator = communicator
        dtype = torch.from_numpy(weight).dtype
        self.layer = SyncBatchNorm(
            len(weight), eps, momentum, process_group=communicator, dtype=dtype, **conventions
        )
        self.layer.load_state_dict(
            {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}, strict=False
        )

    def train(self, x: Array, dy: Array) -> Step:
        t = self.torch.from_numpy(x).requires_grad_()
        self.layer.zero_grad()
        y = self.layer.train()(t)
        y.backward(self.torch.from_numpy(dy))
        assert t.grad is not None
        assert self.layer.weight.grad is not None
        assert self.layer.bias.grad is not None
        sums = [
            self.communicator.allreduce(g.double().numpy())
            for g in (self.layer.weight.grad, self.layer.bias.grad)
        ]
        return Step(y.detach().numpy(), t.grad.numpy(), *sums)

    def evaluate(self, x: Array) -> Array:
        with self.torch.no_grad():
            return np.asarray(self.layer.eval()(self.torch.from_numpy(x)))

    def running(self) -> tuple[Array, Array]:
        return np.asarray(self.layer.running_mean), np.asarray(self.layer.running_var)


class ChainerSurface:
    initial_var = 0.0

    def __init__(
        self,
        weight: Array,
        bias: Array,
        communicator: Communicator,
        *,
        eps: float,
        momentum: float,
        **conventions: Any,
    ) -> None:
        from multibn.chainer_backend import MultiNodeBatchNormalization

        self.communicator = communicator
        if "running_var" in conventions:
            conventions["avg_var"] = conventions.pop("running_var")
        self.link = MultiNodeBatchNormalization(
            len(weight), communicator, 1 - momentum, eps, weight.dtype, **conventions
        )
        self.link.gamma.array[...] = weight
        self.link.beta.array[...] = bias

    def train(self, x: Array, dy: Array) -> Step:
        import chainer

        v = chainer.Variable(x)
        self.link.cleargrads()
        y = self.link(v)
        y.grad = dy
        y.backward()
        size = self.communicator.size
        return Step(y.array, v.grad, self.link.gamma.grad * size, self.link.beta.grad * size)

    def evaluate(self, x: Array) -> Array:
        import chainer

        with chainer.using_config("train", False):
            return np.asarray(self.link(x).array)

    def running(self) -> tuple[Array, Array]:
        return self.link.avg_mean, self.link.avg_var


SURFACES: dict[str, Callable[..., Surface]] = {"torch": TorchSurface, "chainer": ChainerSurface}
