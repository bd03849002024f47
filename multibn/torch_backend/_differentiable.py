"""The forward pass made of operations that torch can differentiate in any mode, again and again.

For second derivatives, forward mode and torch.func. Training steps take the analytic backward pass
of `_autograd` instead, which needs less time and memory. The ranks share one operation, the sum of
their messages; its derivative is the sum of the messages' derivatives, which is one more message.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multibn import kernels, message, recompute, statistics
from multibn._arrays import is_on_host, is_traced
from multibn._typing import Weighting
from multibn.communicators import Communicator, conversation
from multibn.statistics import BatchStatistics
from multibn.torch_backend._input import Input, during, without_autocast


def is_needed() -> bool:
    """Whether torch.func transforms this call, or forward mode may have tangents for its inputs."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def forward_all(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting
) -> list[tuple[Tensor, BatchStatistics]]:
    """Each input normalized, and the statistics of its batch, without a gradient. Collective."""
    xs = [i.x for i in inputs]
    ys, batches = normalize_all(
        inputs,
        during(communicator, "forward", xs),
        during(communicator, "derivative", xs),
        weighting,
    )
    batches = [BatchStatistics(*[part.detach() for part in batch]) for batch in batches]
    # A pass that runs again goes on along its tape, and yet computes the statistics anew: those on
    # the tape have no derivatives.
    recompute.taped_all(lambda: batches, lambda: [tuple(b.mean.shape) for b in batches])
    return list(zip(ys, batches, strict=True))


def normalize_all(
    inputs: Sequence[Input],
    forward: Communicator,
    derivative: Communicator,
    weighting: Weighting,
) -> tuple[list[Tensor], list[BatchStatistics]]:
    """Each input normalized, and the statistics, both differentiable. Collective over `forward`.

    Derivatives are collective over `derivative`, which names the same ranks.
    """
    with kernels.differentiable(), without_autocast(inputs[0].x):
        batches = statistics.batch_statistics_all(
            [i.x for i in inputs],
            _Differentiable(forward, derivative),
            weighting=weighting,
            axes=[i.axis for i in inputs],
        )
        ys = []
        for (x, weight, bias, eps, axis, residual, relu), batch in zip(
            inputs, batches, strict=True
        ):
            y = statistics.normalize(x, batch, weight=weight, bias=bias, eps=eps, axis=axis)
            ys.append(add_relu(y, residual, relu))
    return ys, batches


def add_relu(y: Tensor, residual: Tensor | None, relu: bool, /) -> Tensor:
    """Add `residual`, if any, to `y`, then apply ReLU if `relu`."""
    y = y if residual is None else y + residual
    return y.relu() if relu else y


class _Differentiable:
    """A communicator whose allreduce torch can differentiate."""

    def __init__(self, communicator: Communicator, derivative: Communicator) -> None:
        self.wrapped, self.derivative = communicator, derivative
        self.rank, self.size = communicator.rank, communicator.size

    def allreduce(self, x: Tensor, /) -> Tensor:
        if self.size == 1:  # torch knows the operations of one process
            return x
        return _AllReduce.apply(x, self.wrapped, self.derivative)

    def split(self, color: int, key: int = 0) -> Communicator:
        return _Differentiable(self.wrapped.split(color, key), self.derivative.split(color, key))


class _AllReduce(torch.autograd.Function):
    """y = sum over ranks of x. Its derivatives are the same operation, forward and backward.

    vmap sends one message for each entry of its batch, so that all messages have one length.
    """

    @staticmethod
    def forward(x: Tensor, communicator: Communicator, derivative: Communicator) -> Tensor:
        _check_numbers(x, communicator.size)
        summed = communicator.allreduce(x)
        # Here, because under vmap the other ranks' next message would not be for the rank that
        # refused. Derivatives may be NaN.
        if communicator is not derivative and is_on_host(summed) and message.is_refusal(summed):
            conversation.raise_for_refusal(communicator, refused=False)
        return summed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.derivative = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _AllReduce.apply(grad_outputs[0], ctx.derivative, ctx.derivative), None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        return _AllReduce.apply(grad_inputs[0], ctx.derivative, ctx.derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *communicators: Any) -> tuple[Tensor, int]:
        return torch.stack([_AllReduce.apply(v, *communicators) for v in x.unbind(in_dims[0])]), 0


def _check_numbers(x: Tensor, num_ranks: int) -> None:
    """Raise unless `x` has numbers that a message can carry to the other ranks."""
    if torch._C._functorch.is_legacy_batchedtensor(x):
        raise NotImplementedError(
            "`vectorize=True` in torch.autograd.functional and `is_grads_batched=True` in "
            "torch.autograd.grad do not work for a layer that shares statistics with other ranks: "
            f"got {num_ranks} ranks. torch hides the numbers of such a batch from the layer. Use "
            "torch.func.jacrev, jacfwd, hessian or vmap."
        )
    if is_traced(x):
        raise NotImplementedError(
            "torch.func.linearize and make_fx cannot trace a layer that shares statistics with "
            f"other ranks: got {num_ranks} ranks. The trace would repeat the sums of this call for "
            "other numbers, too. Use torch.func.jvp."
        )
