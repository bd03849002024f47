"""A layer's passes as operators that torch.compile calls without looking inside.

Inside an operator the pass, its communication included, runs as without compilation. The compiler
sees tensors in and tensors out, so a model compiles with `fullgraph=True` over any communicator.
Meta and fake tensors take the same way: an operator computes the shapes of its results from theirs.
An operator takes only tensors, numbers and strings, so a communicator is passed as its id.
"""

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from multibn import masks, population, recompute, statistics, step
from multibn._typing import RunningVar, Weighting
from multibn.communicators import Communicator
from multibn.statistics import BatchStatistics
from multibn.step import Gradient, Input
from multibn.torch_backend import _autograd, _differentiable, functional

# Weak: a communicator ends with its layer, and so does the graph compiled for the layer.
_communicators: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


def register(communicator: Communicator, /) -> None:
    """Let the operators find a communicator by its id."""
    _communicators[id(communicator)] = communicator


def takes(x: Any, /) -> bool:
    """Whether `forward` is to take `x`: in compiled code, and without data."""
    if torch.compiler.is_compiling():
        return True
    return isinstance(x, FakeTensor) or getattr(x, "is_meta", False)


def forward(
    input: Input, num_channels: int, communicator: Communicator, /, *, weighting: Weighting
) -> tuple[Tensor, BatchStatistics, Any]:
    """`functional.forward_all` of one input; one operator in compiled code and without data.

    There, residual and ReLU stay outside the operator, so that the compiler can fuse them. Under
    torch.func and in forward mode, which operators do not support, the pass runs without
    compilation. The third result is this rank's elements per channel.

    Raises
    ------
    RuntimeError
        In torch.export: the program would hold the communicator of this process.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and _is_exporting():
        raise RuntimeError(
            "torch.export cannot export layers that share statistics in training: the program "
            "would need the processes of this run. Call model.eval() first, or export a copy of "
            "the model after revert_sync_batchnorm."
        )
    # Not by `takes`: where this frame is not compiled, the compiler may yet take that one.
    without_data = isinstance(input.x, FakeTensor) or getattr(input.x, "is_meta", False)
    if _differentiable.is_needed() if compiling else not without_data:
        results = functional.forward_all([input], [num_channels], communicator, weighting=weighting)
        return *results[0], step.local_count(functional.complete(input))
    if not compiling:
        functional.check_input(input.x, num_channels)
    x, weight, bias, eps, axis, residual, relu, _, asked = input
    axis = axis or statistics.reduced_axes(x.ndim)
    mask = asked
    if isinstance(asked, masks.Asked):
        mask = _mask(x, *asked, num_channels, id(communicator), axis)
    options = num_channels, id(communicator), eps, weighting, axis, mask
    y, *batch = _forward(x, weight, bias, *options)
    y = functional.add_relu(y, residual, relu)
    if mask is None:
        return y, BatchStatistics(*batch), x.numel() // max(batch[0].numel(), 1)
    return torch.where(mask, y, 0.0), BatchStatistics(*batch), mask.sum().to(batch[0])


# torch 2.6 has no such function.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    batch: BatchStatistics,
    /,
    *,
    momentum: float | Tensor,
    local_count: int | Tensor,
    convention: RunningVar,
) -> tuple[Tensor, Tensor]:
    """As `population.update_running`, in one operator."""
    if not isinstance(momentum, Tensor):
        momentum = torch.full((), momentum, dtype=torch.float64, device=batch.mean.device)
    if not isinstance(local_count, Tensor):
        local_count = torch.full((), local_count, dtype=torch.float64, device=batch.mean.device)
    return _update_running(running_mean, running_var, batch, momentum, local_count, convention)


@torch.library.custom_op("multibn::mask", mutates_args=())
def _mask(
    x: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    num_channels: int,
    communicator: int,
    axis: Sequence[int],
) -> Tensor:
    try:
        functional.check_input(x, num_channels)
        checked = masks.checked(x, masks.Asked(mask, lengths), axis=tuple(axis))
    except (TypeError, ValueError) as error:
        functional.refuse(error, [x], [num_channels], _communicators[communicator])
    assert checked is not None
    return checked.clone()  # an operator's output must not share memory with its inputs


@_mask.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    axis = others[-1]
    return x.new_empty([n if i in axis else 1 for i, n in enumerate(x.shape)], dtype=torch.bool)


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
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ((y, batch),) = functional.forward_all(
        [Input(x, weight, bias, eps, tuple(axis), mask=mask)],
        [num_channels],
        _communicators[communicator],
        weighting=cast(Weighting, weighting),
    )
    if recompute.in_recomputing():  # a count of 0 makes `update_running` keep the old values
        batch = batch._replace(count=torch.zeros_like(batch.count))
    # Cloned: an operator's outputs must not share memory, and these are parts of one message.
    return (y, *(part.clone() for part in batch))


@_forward.register_fake
def _(x: Tensor, weight: Any, bias: Any, num_channels: int, *options: Any) -> tuple[Tensor, ...]:
    *_, axis, _ = options
    # Not x's own number of channels: the operator, and not the compiler, refuses a wrong one.
    expected = x.new_empty((x.shape[0], num_channels, *x.shape[2:]))
    shape = statistics.channels(expected, tuple(axis))
    shapes: list[tuple[int, ...]] = [shape, shape, (), ()]
    return torch.empty_like(x), *(x.new_empty(s, dtype=torch.float64) for s in shapes)


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
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # The gradient of bias gets the dtype of the array that stands for bias: float64.
    i = Input(x, weight, batch[0], eps, tuple(axis), mask=mask)
    gradient = Gradient(dy, i, BatchStatistics(*batch), needs_dx)
    if torch.is_anomaly_enabled():
        _autograd.find_nan([gradient], _communicators[communicator])
    ((dx, _, dweight, dbias),) = step.backward([gradient], _communicators[communicator])
    assert dbias is not None
    return (
        torch.empty_like(x) if dx is None else dx,
        torch.empty_like(dbias) if dweight is None else dweight.double(),
        dbias,
    )


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Any, batch: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(batch[0]), torch.empty_like(batch[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.communicator, ctx.eps, _, ctx.axis, mask = inputs
    ctx.save_for_backward(x, weight, bias, mask, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, mask, *batch = ctx.saved_tensors
    needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
    dx, dweight, dbias = _backward(
        dy, x, weight, batch, ctx.communicator, ctx.eps, needs_dx, ctx.axis, mask
    )
    return (
        dx if needs_dx else None,
        dweight.to(weight.dtype) if needs_dweight else None,
        dbias.to(bias.dtype) if needs_dbias else None,
        *[None] * 6,
    )


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@torch.library.custom_op("multibn::update_running", mutates_args=())
def _update_running(
    running_mean: Tensor,
    running_var: Tensor,
    batch: Sequence[Tensor],
    momentum: Tensor,
    local_count: Tensor,
    convention: str,
) -> tuple[Tensor, Tensor]:
    return population.update_running(
        running_mean,
        running_var,
        BatchStatistics(*batch),
        momentum=momentum,
        local_count=local_count,
        convention=cast(RunningVar, convention),
    )


@_update_running.register_fake
def _(running_mean: Tensor, running_var: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)
