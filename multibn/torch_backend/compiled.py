"""A layer's passes, which code that torch.compile compiles calls as operators taken whole.

What is inside, communication included, runs as it does without compilation; the compiler sees
tensors in and tensors out, so that a model compiles with `fullgraph=True` over any communicator.
An operator takes numbers, strings and tensors only: a communicator goes by the number under which
its layer has registered it.
"""

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from multibn import population, recompute, statistics
from multibn._typing import RunningVar, Weighting
from multibn.communicators import Communicator
from multibn.statistics import BatchStatistics
from multibn.torch_backend import _autograd, functional
from multibn.torch_backend._autograd import Gradient, Input

# As long as their layers live: a compiled graph ends with its layers, too.
_communicators: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


def register(communicator: Communicator, /) -> None:
    """Make a communicator known to the operators, under its id."""
    _communicators[id(communicator)] = communicator


def forward(
    input: Input, num_channels: int, communicator: Communicator, /, *, weighting: Weighting
) -> tuple[Tensor, BatchStatistics]:
    """`functional.forward_all` of one input, which in compiled code is one operator.

    The compiler can fuse what follows the normalization itself.
    """
    if not torch.compiler.is_compiling():
        return functional.forward_all([input], [num_channels], communicator, weighting=weighting)[0]
    x, weight, bias, eps, axis, residual, relu = input
    axis = statistics.reduced_axes(x.ndim) if axis is None else axis
    y, *batch = _forward(x, weight, bias, num_channels, id(communicator), eps, weighting, axis)
    return functional.add_relu(y, residual, relu), BatchStatistics(*batch)


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    batch: BatchStatistics,
    /,
    *,
    momentum: float | Tensor,
    local_count: int,
    convention: RunningVar,
) -> tuple[Tensor, Tensor]:
    """As `population.update_running`, in one operator."""
    if not isinstance(momentum, Tensor):
        momentum = torch.full((), momentum, dtype=torch.float64, device=batch.mean.device)
    return _update_running(running_mean, running_var, *batch, momentum, local_count, convention)


@torch.library.custom_op("multibn::sync_batch_norm", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_channels: int,
    communicator: int,
    eps: float,
    weighting: str,
    axis: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ((y, batch),) = functional.forward_all(
        [Input(x, weight, bias, eps, tuple(axis))],
        [num_channels],
        _communicators[communicator],
        weighting=cast(Weighting, weighting),
    )
    if recompute.in_recomputing():  # nothing is updated where all ranks were empty
        batch = batch._replace(count=torch.zeros_like(batch.count))
    # The statistics are parts of one message; an operator's outputs must not share memory.
    return (y, *(part.clone() for part in batch))


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_channels: int,
    communicator: int,
    eps: float,
    weighting: str,
    axis: Sequence[int],
) -> tuple[Tensor, ...]:
    # Not x's own number of channels: the operator is to refuse another, not the compiler.
    expected = x.new_empty((x.shape[0], num_channels, *x.shape[2:]))
    per_channel = x.new_empty(statistics.channels(expected, tuple(axis)), dtype=torch.float64)
    scalar = x.new_empty((), dtype=torch.float64)
    return (
        torch.empty_like(x),
        per_channel,
        torch.empty_like(per_channel),
        scalar,
        torch.empty_like(scalar),
    )


@torch.library.custom_op("multibn::sync_batch_norm_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    batch: Sequence[Tensor],
    communicator: int,
    eps: float,
    needs_dx: bool,
    axis: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    i = Input(x, weight, None, eps, tuple(axis))
    gradient = Gradient(dy, i, BatchStatistics(*batch), needs_dx)
    ((dx, sums),) = _autograd.backward([gradient], _communicators[communicator])
    return torch.empty_like(x) if dx is None else dx, sums.sum_dy_xhat, sums.sum_dy


@_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    batch: Sequence[Tensor],
    communicator: int,
    eps: float,
    needs_dx: bool,
    axis: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(batch[0]), torch.empty_like(batch[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.communicator, ctx.eps, _, ctx.axis = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, *batch = ctx.saved_tensors
    needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
    dx, dweight, dbias = _backward(
        dy, x, weight, batch, ctx.communicator, ctx.eps, needs_dx, ctx.axis
    )
    return (
        dx if needs_dx else None,
        dweight.to(weight.dtype) if needs_dweight else None,
        dbias.to(bias.dtype) if needs_dbias else None,
        *[None] * 5,
    )


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@torch.library.custom_op("multibn::update_running", mutates_args=())
def _update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    element_weight: Tensor,
    momentum: Tensor,
    local_count: int,
    convention: str,
) -> tuple[Tensor, Tensor]:
    return population.update_running(
        running_mean,
        running_var,
        BatchStatistics(mean, var, count, element_weight),
        momentum=momentum,
        local_count=local_count,
        convention=cast(RunningVar, convention),
    )


@_update_running.register_fake
def _(running_mean: Tensor, running_var: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)
