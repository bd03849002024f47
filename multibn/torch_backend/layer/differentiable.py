"""The forward pass made of operations that torch can differentiate in any mode, again and again.

For second derivatives and, in one process, for forward mode and torch.func. Training steps take the
analytic backward pass of `autograd` instead, which needs less time and memory. The ranks share one
operation, the sum of their messages; its gradient is the sum of the messages' gradients, which is
one more message.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multibn._typing import Weighting
from multibn.communicators import Communicator, conversation
from multibn.engine import masks, recompute, statistics, step
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Input
from multibn.kernels import generic

_NOTHING = nullcontext()


def is_needed() -> bool:
    """Whether torch.func transforms this call, or forward mode may have tangents for its inputs."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def without_autocast(x: Any, /) -> AbstractContextManager[Any]:
    """A context in which operations on tensors like `x` keep their dtypes."""
    if torch._C._is_any_autocast_enabled():
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return _NOTHING


def forward_all(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting
) -> list[tuple[Tensor, BatchStatistics]]:
    """Each input normalized, and the statistics of its batch, without a gradient. Collective."""
    if "torch._dynamo" in sys.modules:  # `disable` would load the compiler, which takes seconds
        return torch.compiler.disable(_forward_all)(inputs, communicator, weighting)
    return _forward_all(inputs, communicator, weighting)


def _forward_all(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting
) -> list[tuple[Tensor, BatchStatistics]]:
    # A pass that runs again goes on along its tape, and yet computes the statistics anew: those on
    # the tape have no derivatives.
    replays = (
        recompute.replayed([statistics.channels(i.x.shape, i.axis) for i in inputs]) is not None
    )
    ys, batches = normalize_all(inputs, communicator, weighting, phase="forward")
    batches = [BatchStatistics(*[part.detach() for part in batch]) for batch in batches]
    if not replays:
        recompute.record(batches, inputs, communicator)
        for i, batch in zip(inputs, batches, strict=True):
            if i.running is not None:
                _, count, *_ = statistics.sizes(i.x.shape, i.axis)
                step.move(i.running, batch, masks.weigh(i, count, "element")[1], generic)
    return list(zip(ys, batches, strict=True))


def normalize_all(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting, *, phase: str
) -> tuple[list[Tensor], list[BatchStatistics]]:
    """Each input normalized, and the statistics, both differentiable.

    Collective, and so is each derivative.
    """
    pure = [i._replace(running=None) for i in inputs]
    sharing = _Differentiable(communicator, phase, step.announced([i.x for i in inputs]))
    with without_autocast(inputs[0].x):
        results = step.share(pure, sharing, weighting=weighting, select=lambda x: generic)
    return [y for y, _ in results], [batch for _, batch in results]


class _Differentiable:
    """A layer's communicator in one phase, whose allreduce torch can differentiate."""

    def __init__(self, communicator: Communicator, phase: str, dtypes: Any) -> None:
        self.wrapped, self.phase, self.dtypes = communicator, phase, dtypes
        self.rank, self.size = communicator.rank, communicator.size
        self.repeats = phase == "second order"  # the forward pass, whose outcome has been noted

    def allreduce(self, x: Tensor, /) -> Tensor:
        # torch differentiates all that one process does, and transforms it, too.
        return x if self.size == 1 else _AllReduce.apply(_checked(x, self.size), self, self.phase)

    def split(self, color: int, key: int = 0) -> Communicator:
        return _Differentiable(self.wrapped.split(color, key), self.phase, self.dtypes)


class _AllReduce(torch.autograd.Function):
    """y = sum over ranks of x. The gradient of x is the sum of the gradients of y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: _Differentiable, phase: str) -> Tensor:
        ctx.communicator = communicator
        during = conversation.during(communicator.wrapped, phase, communicator.dtypes)
        return during.allreduce(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        dy = _checked(grad_outputs[0], ctx.communicator.size)
        return _AllReduce.apply(dy, ctx.communicator, "gradient"), None, None


def _checked(x: Tensor, num_ranks: int) -> Tensor:
    """`x`, unless torch hides its numbers, or those of a tangent, from the layer."""
    if is_needed() or torch._C._functorch.is_legacy_batchedtensor(x):
        raise NotImplementedError(
            "torch.func, forward mode, `vectorize=True` in torch.autograd.functional and "
            "`is_grads_batched=True` in torch.autograd.grad work for a layer of one process: got "
            f"{num_ranks} ranks that share statistics. Call torch.autograd.grad, with "
            "create_graph=True for second derivatives, or pass process_group=SingleProcess()."
        )
    return x
