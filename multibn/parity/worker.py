"""The work of a rank of the parity command: train layers, and compare with the oracle.

An adapter gives a framework's layer or model a small interface of NumPy arrays. A rank compares
results after all communication, so that a failure leaves no other rank waiting in a collective.
Only functions import frameworks.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from multibn.communicators import Communicator
from multibn.parity import oracle
from multibn.parity.cases import BOUNDS, CASES, CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array

# One rank's arrays by "step/quantity"; gradients of weight and bias are means over the ranks.
Arrays = dict[str, Array]

QUANTITIES = ("y", "dx", "dweight", "dbias", "running_mean", "running_var")  # of a step


class Error(NamedTuple):
    """The error of a quantity on a rank in a step; infinite for NaN."""

    ratio: float  # error / bound
    error: float  # relative to the largest expected entry
    bound: float
    quantity: str
    case: str
    adapter: str
    text: str = ""  # describes an option that differs, whose error is infinite
    layer: str = ""  # the first layer whose output differs


class Torch:
    """A torch module, called by way of `call`."""

    def __init__(self, module: Any, call: Callable[..., Any] | None = None) -> None:
        self.module, self.call = module, call or module

    def state(self) -> list[Array]:
        """Return the framework's gradients of weight and bias, and the running statistics."""
        m = self.module
        return list(map(_from_torch, (m.weight.grad, m.bias.grad, m.running_mean, m.running_var)))

    def train(self, x: Array, dy: Array | None = None, **masks: Array) -> tuple[Array, Array]:
        """Return the output and the gradient of `x`; without `dy`, of the loss sum(y**3) / 3.

        For the losses sum(y) and sum(y**2), the gradient of batch normalization would be 0.
        """
        t = _to_torch(x).requires_grad_()
        self.module.train().zero_grad()
        y = self.call(t, **{name: _to_torch(a) for name, a in masks.items()})
        y.backward(y.detach() ** 2 if dy is None else _to_torch(dy))
        return _from_torch(y), _from_torch(t.grad)

    def evaluate(self, x: Array, **masks: Array) -> Array:
        """Return the output in evaluation mode."""
        import torch

        with torch.no_grad():
            tensors = {name: _to_torch(a) for name, a in masks.items()}
            return _from_torch(self.module.eval()(_to_torch(x), **tensors))


def _to_torch(a: Array) -> Any:
    """Return a tensor on torch's default device."""
    import torch

    return torch.from_numpy(a).to(torch.get_default_device())


def _from_torch(t: Any) -> Array:
    return np.asarray(t.detach().cpu())


class Chainer:
    """A Chainer link, called by way of `call`."""

    def __init__(self, link: Any, call: Callable[..., Any] | None = None) -> None:
        self.link, self.call = link, call or link

    def state(self) -> list[Array]:
        link = self.link
        return [link.gamma.grad, link.beta.grad, link.avg_mean, link.avg_var]

    def train(self, x: Array, dy: Array | None = None, **masks: Array) -> tuple[Array, Array]:
        import chainer

        v = chainer.Variable(x)
        self.link.cleargrads()
        y = self.call(v, **masks)
        y.grad = y.array**2 if dy is None else dy
        y.backward()
        return y.array, v.grad

    def evaluate(self, x: Array, **masks: Array) -> Array:
        import chainer

        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return np.asarray(self.link(x, **masks).array)


def torch_layer(case: Case, communicator: Communicator) -> Torch:
    """Return an adapter of multibn.torch.SyncBatchNorm."""
    from torch.utils.checkpoint import checkpoint

    from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts

    weight, bias = map(_to_torch, case.parameters())
    layer = SyncBatchNorm(
        CHANNELS,
        EPS,
        None if case.cumulative else MOMENTUM,
        process_group=communicator,
        weighting=case.weighting,
        running_var=case.running_var,
        dtype=weight.dtype,
    )
    layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    options: Any = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    return Torch(layer, partial(checkpoint, layer, **options) if case.recompute else None)


def chainer_layer(case: Case, communicator: Communicator) -> Chainer:
    """Return an adapter of multibn.chainer.MultiNodeBatchNormalization."""
    from multibn.chainer_backend import MultiNodeBatchNormalization

    # isort: split
    from chainer.functions import forget

    weight, bias = case.parameters()
    link: Any = MultiNodeBatchNormalization(
        CHANNELS,
        communicator,
        1 - MOMENTUM,
        EPS,
        weight.dtype,
        weighting=case.weighting,
        avg_var=case.running_var,
    )
    link.gamma.array[...], link.beta.array[...] = weight, bias
    link.avg_var[...] = 1

    def call(v: Any, **options: Any) -> Any:
        forward = partial(link, finetune=case.cumulative, **options)
        return forget(forward, v) if case.recompute else forward(v)

    return Chainer(link, call)


ADAPTERS: dict[str, Any] = {"torch": torch_layer, "chainer": chainer_layer}


def measure(
    communicator: Communicator, adapters: Sequence[str], cases: Sequence[str]
) -> list[Error]:
    """Return the errors of the named `adapters` in the named `cases` on this rank. Collective."""
    arrays = {
        (case, adapter): train(adapter, case, communicator)
        for case in CASES
        if case.name in cases
        for adapter in adapters
    }
    rank, size = communicator.rank, communicator.size
    return [
        e for (case, adapter), a in arrays.items() for e in compare(adapter, case, a, rank, size)
    ]


def train(adapter: str, case: Case, communicator: Communicator) -> Arrays:
    """Train and evaluate a layer, and return this rank's arrays. Collective."""
    layer = ADAPTERS[adapter](case, communicator)
    arrays: Arrays = {}
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        arguments = {} if case.masked_value is None else {"mask": masks[rank]}
        y_and_dx = layer.train(xs[rank], dys[rank], **arguments)
        dweight, dbias, *running = (np.asarray(a).copy() for a in layer.state())
        # Average over ranks, as optimizers do. torch's gradients are local, Chainer's are means.
        means = [communicator.allreduce(a.astype(np.float64)) / size for a in (dweight, dbias)]
        arrays |= _named(step, *y_and_dx, *means, *running)
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    return arrays


@lru_cache(1)  # the adapters of a case are compared one after the other
def expected(case: Case, rank: int, size: int) -> Arrays:
    """Return the arrays that `train` should return on this rank."""
    arrays: Arrays = {}
    running = np.zeros(CHANNELS), np.ones(CHANNELS)
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        whole = oracle.batch_norm(
            xs, dys, *case.parameters(), eps=EPS, weighting=case.weighting, masks=masks
        )
        count = masks[rank].sum() if case.running_var == "unbiased_local" else whole.count
        factor = 1.0 if case.running_var == "biased" else count / max(count - 1, 1)
        momentum = 1 / (step + 1) if case.cumulative else MOMENTUM
        running = oracle.running(running, whole.mean, whole.var, factor, momentum)
        gradients = whole.dx[rank], whole.dweight / size, whole.dbias / size
        arrays |= _named(step, whole.y[rank], *gradients, *running)
    arrays[f"{step}/eval"] = oracle.normalize(
        xs[rank], *running, *case.parameters(), eps=EPS, mask=masks[rank]
    )
    return arrays


def _named(step: int, *arrays: Array) -> Arrays:
    return {f"{step}/{name}": a for name, a in zip(QUANTITIES, arrays, strict=True)}


def compare(adapter: str, case: Case, got: Arrays, rank: int, size: int) -> list[Error]:
    """Return the errors of `got`, the arrays that `train` returned on this rank."""
    errors = []
    for key, array in expected(case, rank, size).items():
        quantity = key.rpartition("/")[2]
        error, bound = oracle.relative_error(got[key], array), BOUNDS[case.dtype][quantity]
        errors.append(Error(error / bound, error, bound, quantity, case.name, adapter))
    return errors
