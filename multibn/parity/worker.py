"""The work of each rank of the parity command: trains layers, and finds their errors.

A adapter is a framework's layer or model behind one small interface of NumPy arrays. A rank
compares when all communication is over, so that it cannot fail and leave the other ranks waiting
in a collective. Only functions import frameworks.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from multibn.communicators import Communicator
from multibn.parity import oracle
from multibn.parity.cases import CASES, CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array

# One rank's arrays by "step/quantity"; gradients of weight and bias are means over the ranks.
Arrays = dict[str, Array]

QUANTITIES = ("y", "dx", "dweight", "dbias", "running_mean", "running_var")  # of a step


class Error(NamedTuple):
    """The error of a quantity on a rank in a step; NaN counts as infinite."""

    ratio: float  # of the error to its bound
    error: float  # relative to the largest expected entry
    bound: float
    quantity: str
    case: str
    adapter: str
    text: str = ""  # of an option that differs, whose error is infinite
    layer: str = ""  # the first layer whose output differs


class Torch:
    """A module of torch, called by `call`."""

    def __init__(self, module: Any, call: Callable[..., Any] | None = None) -> None:
        self.module, self.call = module, call or module

    def state(self) -> list[Array]:
        """Gradients of weight and bias as the framework gives them, and running statistics."""
        m = self.module
        return list(map(_from_torch, (m.weight.grad, m.bias.grad, m.running_mean, m.running_var)))

    def train(self, x: Array, dy: Array | None = None, **masks: Array) -> tuple[Array, Array]:
        """The output and the gradient of `x`; without `dy`, down the sum of y**3 / 3.

        Of the sum of y, or of y**2, batch normalization gives dx = 0.
        """
        t = _to_torch(x).requires_grad_()
        self.module.train().zero_grad()
        y = self.call(t, **{name: _to_torch(a) for name, a in masks.items()})
        y.backward(y.detach() ** 2 if dy is None else _to_torch(dy))
        return _from_torch(y), _from_torch(t.grad)

    def evaluate(self, x: Array, **masks: Array) -> Array:
        """The output in evaluation."""
        import torch

        with torch.no_grad():
            tensors = {name: _to_torch(a) for name, a in masks.items()}
            return _from_torch(self.module.eval()(_to_torch(x), **tensors))


def _to_torch(a: Array) -> Any:
    """A tensor on the device where torch makes tensors."""
    import torch

    return torch.from_numpy(a).to(torch.get_default_device())


def _from_torch(t: Any) -> Array:
    return np.asarray(t.detach().cpu())


class Chainer:
    """A link of Chainer, called by `call`."""

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
    """multibn.torch.SyncBatchNorm."""
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
    """multibn.chainer.MultiNodeBatchNormalization."""
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
        one = partial(link, finetune=case.cumulative, **options)
        return forget(one, v) if case.recompute else one(v)

    return Chainer(link, call)


ADAPTERS: dict[str, Any] = {"torch": torch_layer, "chainer": chainer_layer}


def measure(
    communicator: Communicator, adapters: Sequence[str], cases: Sequence[str]
) -> list[Error]:
    """This rank's errors of layers in the cases of these names. Collective."""
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
    """Train a layer. Collective."""
    layer = ADAPTERS[adapter](case, communicator)
    arrays: Arrays = {}
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        arguments = {} if case.padding is None else {"mask": masks[rank]}
        y_and_dx = layer.train(xs[rank], dys[rank], **arguments)
        dweight, dbias, *running = (np.asarray(a).copy() for a in layer.state())
        # Optimizers average so. torch's gradients are each rank's sums; Chainer's are means.
        means = [communicator.allreduce(a.astype(np.float64)) / size for a in (dweight, dbias)]
        arrays |= _named(step, *y_and_dx, *means, *running)
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    return arrays


@lru_cache(1)  # one adapter after the other
def expected(case: Case, rank: int, size: int) -> Arrays:
    """The right results of `train` on this rank."""
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
    """The errors of what `train` has given on this rank."""
    errors = []
    for key, array in expected(case, rank, size).items():
        quantity = key.rpartition("/")[2]
        error, bound = oracle.relative_error(got[key], array), case.bound(quantity)
        errors.append(Error(error / bound, error, bound, quantity, case.name, adapter))
    return errors
