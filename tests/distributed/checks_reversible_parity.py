"""Reversible blocks with multi-node batch norm: torch, Chainer, and the whole batch in one process.

All in float64 and over the launcher's one communicator; the ranks' shares of the batch differ.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.chainer_backend import ReversibleSequence as ChainerSequence
from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from multibn.torch_backend.reversible import ReversibleSequence as TorchSequence
from tests.helpers.ranks import CountingCommunicator

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip
from chainer import links as L  # isort: skip

C, BLOCKS = 5, 4
EPS, MOMENTUM = 1e-5, 0.1
ROWS = [7, 3, 4, 0]
TOLERANCE = 1e-11

Arrays = dict[str, Any]


class Step(NamedTuple):
    outputs: list[Any]
    input_gradients: list[Any]
    weight_gradients: Arrays  # of the sum of all ranks' losses
    averages: Arrays
    messages: tuple[list[int], list[int]]  # of the forward and of the backward pass


def _weights() -> Arrays:
    """By torch's names."""
    rng = np.random.default_rng(0)
    weights = {}
    for i in range(BLOCKS):
        for name in "FG":
            for linear in ("before", "after"):
                weights[f"layers.{i}.{name}.{linear}.weight"] = rng.normal(0, 0.5, (C, C))
                weights[f"layers.{i}.{name}.{linear}.bias"] = rng.normal(size=C)
            weights[f"layers.{i}.{name}.norm.weight"] = rng.uniform(0.5, 1.5, C)
            weights[f"layers.{i}.{name}.norm.bias"] = rng.normal(size=C)
    return weights


def _batches(world: Communicator) -> list[list[Any]]:
    """Both streams of each rank."""
    rng = np.random.default_rng(1)
    return [[rng.normal(2, 3, (n, C)) for _ in range(2)] for n in ROWS[: world.size]]


def _sums(world: Communicator, gradients: Arrays) -> Arrays:
    return {name: world.allreduce(g) for name, g in gradients.items()}


class _TorchFunction(nn.Module):
    """What F and G are."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(C, C, dtype=torch.float64) for _ in range(2))
        self.norm = norm

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.after(self.norm(self.before(x))))


class _ChainerFunction(chainer.Chain):
    """The same."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.before, self.after = L.Linear(C, C), L.Linear(C, C)
            self.norm = norm

    def forward(self, x: Any) -> Any:
        return F.tanh(self.after(self.norm(self.before(x))))


def _torch_step(
    norm: Callable[[], nn.Module], xs: list[Any], mode: Any
) -> tuple[nn.Module, list[Any], Any, Any]:
    blocks = [(_TorchFunction(norm()), _TorchFunction(norm())) for _ in range(BLOCKS)]
    net = TorchSequence(blocks, mode=mode)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.from_numpy(_weights()[name]))
    inputs = [torch.from_numpy(x).requires_grad_() for x in xs]
    y1, y2 = net(*inputs)
    return net, inputs, (y1, y2), (y1.sin() * y2).sum()


def _of_torch(world: Communicator, mode: Any) -> Step:
    counting = CountingCommunicator(world)

    def norm() -> nn.Module:
        return SyncBatchNorm(C, EPS, MOMENTUM, process_group=counting, dtype=torch.float64)

    net, inputs, outputs, loss = _torch_step(norm, _batches(world)[world.rank], mode)
    forward = counting.take()
    loss.backward()
    backward = counting.take()
    gradients = {name: p.grad.numpy() for name, p in net.named_parameters() if p.grad is not None}
    return Step(
        [y.detach().numpy() for y in outputs],
        [x.grad.numpy() for x in inputs],
        _sums(world, gradients),
        {name: b.numpy() for name, b in net.named_buffers() if "running" in name},
        (forward, backward),
    )


_IN_TORCHS_WORDS = {
    "W": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "avg_mean": "running_mean",
    "avg_var": "running_var",
}


def _torchs(path: str) -> str:
    *links, last = path.strip("/").split("/")
    return ".".join([*links, _IN_TORCHS_WORDS[last]])


def _of_chainer(world: Communicator, mode: Any) -> Step:
    counting = CountingCommunicator(world)

    def norm() -> Any:
        link = MultiNodeBatchNormalization(C, counting, decay=1 - MOMENTUM, eps=EPS)
        link.avg_var[...] = 1  # as torch's starts
        return link

    with chainer.using_config("dtype", np.float64):
        blocks = [(_ChainerFunction(norm()), _ChainerFunction(norm())) for _ in range(BLOCKS)]
        net = ChainerSequence(blocks, mode=mode)
    net.cleargrads()
    parameters = {_torchs(path): p for path, p in net.namedparams()}
    for name, p in parameters.items():
        p.array[...] = _weights()[name]
    inputs = [chainer.Variable(x) for x in _batches(world)[world.rank]]
    y1, y2 = net(*inputs)
    forward = counting.take()
    F.sum(F.sin(y1) * y2).backward()
    backward = counting.take()
    state = chainer.serializers.DictionarySerializer()
    state.save(net)
    return Step(
        [y1.array, y2.array],
        [x.grad for x in inputs],
        # Those of gamma and beta are the mean of all ranks' on each rank: the sum is the same.
        _sums(world, {name: p.grad for name, p in parameters.items()}),
        {_torchs(path): a for path, a in state.target.items() if path.split("/")[-1][:4] == "avg_"},
        (forward, backward),
    )


class _PlainBatchNorm(nn.Module):
    """Ioffe & Szegedy's equations for autograd; notes what torch's would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(C, dtype=torch.float64)) for _ in range(2)
        )

    def forward(self, x: Any) -> Any:
        mean, var = x.mean(0), x.var(0, correction=0)
        self.running_mean = (MOMENTUM * mean).detach().numpy()
        self.running_var = (1 - MOMENTUM + MOMENTUM * x.var(0)).detach().numpy()
        return (x - mean) / (var + EPS).sqrt() * self.weight + self.bias


def _of_the_whole_batch(world: Communicator) -> Step:
    """In this process alone, stored; of inputs and outputs, this rank's rows."""
    batches = _batches(world)
    whole = [np.concatenate(streams) for streams in zip(*batches, strict=True)]
    net, inputs, outputs, loss = _torch_step(_PlainBatchNorm, whole, "stored")
    loss.backward()
    start = sum(ROWS[: world.rank])
    rows = slice(start, start + ROWS[world.rank])
    averages = {
        f"{name}.{kept}": getattr(module, kept)
        for name, module in net.named_modules()
        if isinstance(module, _PlainBatchNorm)
        for kept in ("running_mean", "running_var")
    }
    return Step(
        [y.detach().numpy()[rows] for y in outputs],
        [x.grad.numpy()[rows] for x in inputs],
        {name: p.grad.numpy() for name, p in net.named_parameters() if p.grad is not None},
        averages,
        ([], []),
    )


def _error(got: Any, expected: Any) -> float:
    """The largest difference, as a part of the largest number."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        got, expected = ([a[name] for name in sorted(expected)] for a in (got, expected))
    difference, size = (
        max((float(np.abs(a).max()) for a in arrays if a.size), default=0.0)
        for arrays in ([a - b for a, b in zip(got, expected, strict=True)], expected)
    )
    return difference / max(size, 1.0)


def check_torch_and_chainer_are_the_whole_batch(world: Communicator) -> None:
    steps = {
        (of, mode): of(world, mode)
        for of in (_of_torch, _of_chainer)
        for mode in ("reversible", "stored")
    }
    whole = _of_the_whole_batch(world)
    for (of, mode), step in steps.items():
        for field in ("outputs", "input_gradients", "weight_gradients", "averages"):
            error = _error(getattr(step, field), getattr(whole, field))
            assert error < TOLERANCE, (of.__name__, mode, field, error)
        # None in the recomputation, which is a part of the backward pass.
        forward, backward = step.messages
        assert len(backward) == 2 * BLOCKS, (of.__name__, mode, backward)
        assert [forward, backward] == list(steps[of, "stored"].messages)
