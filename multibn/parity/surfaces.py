"""The layers behind one small interface of NumPy arrays.

Only constructors import frameworks, so only workers do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from multibn.communicators import Communicator
from multibn.parity.cases import CHANNELS, EPS, MOMENTUM, Case, NDArrayAny


class Step(NamedTuple):
    """One rank's arrays of a training step; gradients as the framework returns them."""

    y: NDArrayAny
    dx: NDArrayAny
    dweight: NDArrayAny
    dbias: NDArrayAny


class Surface(Protocol):
    """A layer whose running mean starts at 0 and running variance at 1."""

    def train(self, x: NDArrayAny, dy: NDArrayAny, **masks: NDArrayAny) -> Step:
        """Forward, backward and the update of the running statistics."""

    def evaluate(self, x: NDArrayAny, **masks: NDArrayAny) -> NDArrayAny:
        """Normalize by the running statistics."""

    def running(self) -> tuple[NDArrayAny, NDArrayAny]:
        """Copies of the running mean and variance."""


class TorchSurface:
    """multibn's torch layer, or another layer with the interface of nn.BatchNorm2d."""

    def __init__(
        self, case: Case, layer: Any, contexts: Any = None, *, device: str = "cpu"
    ) -> None:
        import torch
        from torch.utils.checkpoint import checkpoint, noop_context_fn

        self.torch = torch
        weight, bias = map(torch.from_numpy, case.parameters())
        self.device = device
        self.layer = layer.to(device, weight.dtype)
        self.layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
        self.call: Callable[..., Any] = self.layer
        if case.recompute:
            options: Any = {"use_reentrant": False, "context_fn": contexts or noop_context_fn}
            self.call = lambda x, **masks: checkpoint(self.layer, x, **masks, **options)

    def train(self, x: NDArrayAny, dy: NDArrayAny, **masks: NDArrayAny) -> Step:
        t = self._tensor(x).requires_grad_()
        self.layer.train().zero_grad()
        y = self.call(t, **self._tensors(masks))
        y.backward(self._tensor(dy))
        results = y, t.grad, self.layer.weight.grad, self.layer.bias.grad
        return Step(*(a.detach().cpu().numpy() for a in results))

    def evaluate(self, x: NDArrayAny, **masks: NDArrayAny) -> NDArrayAny:
        with self.torch.no_grad():
            y = self.layer.eval()(self._tensor(x), **self._tensors(masks))
            return np.asarray(y.cpu())

    def running(self) -> tuple[NDArrayAny, NDArrayAny]:
        mean, var = self.layer.running_mean, self.layer.running_var
        return mean.cpu().numpy().copy(), var.cpu().numpy().copy()

    def _tensor(self, a: NDArrayAny) -> Any:
        return self.torch.from_numpy(a).to(self.device)

    def _tensors(self, arrays: dict[str, NDArrayAny]) -> dict[str, Any]:
        return {name: self._tensor(a) for name, a in arrays.items()}


class ChainerSurface:
    """multibn's Chainer link, or another link with the interface of ChainerMN's."""

    def __init__(self, case: Case, link: Any) -> None:
        self.case, self.link = case, link
        self.link.gamma.array[...], self.link.beta.array[...] = case.parameters()
        self.link.avg_var[...] = 1

    def train(self, x: NDArrayAny, dy: NDArrayAny, **masks: NDArrayAny) -> Step:
        import chainer
        from chainer import functions as F

        v = chainer.Variable(x)
        self.link.cleargrads()
        options: Any = {"finetune": True} if self.case.cumulative else {}
        call = partial(self.link, **options, **masks)
        y = F.forget(call, v) if self.case.recompute else call(v)
        y.grad = dy
        y.backward()
        return Step(y.array, v.grad, self.link.gamma.grad.copy(), self.link.beta.grad.copy())

    def evaluate(self, x: NDArrayAny, **masks: NDArrayAny) -> NDArrayAny:
        import chainer

        with chainer.using_config("train", False):
            return np.asarray(self.link(x, **masks).array)

    def running(self) -> tuple[NDArrayAny, NDArrayAny]:
        return self.link.avg_mean.copy(), self.link.avg_var.copy()


def torch_layer(case: Case, communicator: Communicator) -> Surface:
    """multibn.torch_backend.SyncBatchNorm."""
    from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts

    layer = SyncBatchNorm(
        CHANNELS,
        EPS,
        None if case.cumulative else MOMENTUM,
        process_group=communicator,
        weighting=case.weighting,
        running_var=case.running_var,
    )
    return TorchSurface(case, layer, checkpoint_contexts)


def chainer_link(case: Case, communicator: Communicator) -> Surface:
    """multibn.chainer_backend.MultiNodeBatchNormalization."""
    from multibn.chainer_backend import MultiNodeBatchNormalization

    link = MultiNodeBatchNormalization(
        CHANNELS,
        communicator,
        1 - MOMENTUM,
        EPS,
        case.parameters().weight.dtype,
        weighting=case.weighting,
        avg_var=case.running_var,
    )
    return ChainerSurface(case, link)


SURFACES: dict[str, Callable[[Case, Communicator], Surface]] = {
    "torch": torch_layer,
    "chainer": chainer_link,
}
