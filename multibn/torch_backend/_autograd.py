"""Batch normalization of several inputs as one autograd node: one message each way."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multibn import recompute, statistics
from multibn._typing import Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import during
from multibn.statistics import BatchStatistics, GradientSums


class Input(NamedTuple):
    """The input of one layer, with the layer's parameters and options.

    `axis` names the axes to reduce; `()` stands for all but 1 until `functional.forward_all` fills
    them in. `weight` and `bias` have the shape of the other axes, `(C,)`. `residual`, a tensor like
    `x`, is added to the normalized input; `relu` follows the addition.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    axis: tuple[int, ...] = ()
    residual: Tensor | None = None
    relu: bool = False


class Gradient(NamedTuple):
    """The gradient of one output, the values that made the output, and whether `x` needs one."""

    dy: Tensor
    input: Input
    batch: BatchStatistics
    needs_dx: bool


def batch_statistics(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting
) -> list[BatchStatistics]:
    """Statistics of each whole batch, without a gradient.

    Collective, unless `multibn.recompute` replays the statistics.
    """
    xs, axes = [], []
    for i in inputs:
        xs.append(i.x.detach())
        axes.append(i.axis)

    def compute() -> list[BatchStatistics]:
        with _without_autocast(xs[0]):
            return statistics.batch_statistics_all(
                xs,
                during(communicator, "forward", _dtypes(xs)),
                weighting=weighting,
                axes=axes,
            )

    def channels() -> list[tuple[int, ...]]:
        return [statistics.channels(x, axis) for x, axis in zip(xs, axes, strict=True)]

    return recompute.taped_all(compute, channels)


def normalize(
    inputs: Sequence[Input],
    batches: Sequence[BatchStatistics],
    communicator: Communicator,
    weighting: Weighting,
) -> tuple[Tensor, ...]:
    """Normalize each input by its batch, differentiably through the statistics.

    Not collective; the backward pass is.
    """
    tensors: list[Tensor | None] = []
    options = []
    for x, weight, bias, eps, axis, residual, relu in inputs:
        tensors += (x, weight, bias, residual)
        options.append((eps, axis, relu))
    node = _Transformed if _are_transformed(tensors) else _Normalize
    return node.apply(batches, communicator, weighting, options, *tensors)


def backward(
    gradients: Sequence[Gradient], communicator: Communicator
) -> list[tuple[Tensor | None, GradientSums]]:
    """Gradient of each `x`, and this rank's sums. Collective if any `x` needs a gradient."""
    local = [
        statistics.backward_sums(dy, i.x, batch, eps=i.eps, axis=i.axis)
        for dy, i, batch, _ in gradients
    ]
    wanted = [g.needs_dx for g in gradients]
    if not any(wanted):
        return [(None, sums) for sums in local]
    xs = list(compress((g.input.x for g in gradients), wanted))
    communicator = during(communicator, "backward", _dtypes(xs))
    summed = iter(statistics.aggregate_sums_all(list(compress(local, wanted)), communicator))
    dxs = [
        statistics.input_gradient(
            dy, i.x, batch, next(summed), weight=i.weight, eps=i.eps, axis=i.axis
        )
        if needs_dx
        else None
        for dy, i, batch, needs_dx in gradients
    ]
    return list(zip(dxs, local, strict=True))


class _Normalize(torch.autograd.Function):
    """The autograd node. Gradients through the statistics, which are inputs, are part of dx."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ys = _forward(*inputs)
        _set_up(ctx, inputs, ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        gradients = []
        dresiduals = []
        for k, (dy, (eps, axis, _)) in enumerate(zip(grad_outputs, ctx.options, strict=True)):
            x, weight, bias, rectified, *batch = saved[8 * k : 8 * k + 8]
            if rectified is not None:
                dy = torch.where(rectified.detach() > 0, dy, 0.0)
            i = Input(x, weight, bias, eps, axis)
            gradients.append(Gradient(dy, i, BatchStatistics(*batch), needed[4 * k]))
            dresiduals.append(dy if needed[4 * k + 3] else None)
        results: list[Tensor | None] = [None] * 4
        with _without_autocast(saved[0]):
            if torch.is_grad_enabled():  # create_graph
                grads = _differentiable_backward(ctx, gradients)
                for k, dresidual in enumerate(dresiduals):
                    results += [*grads[3 * k : 3 * k + 3], dresidual]
                return tuple(results)
            for k, (dx, sums) in enumerate(backward(gradients, ctx.communicator)):
                _, i, *_ = gradients[k]
                dweight = sums.sum_dy_xhat.to(i.weight) if needed[4 * k + 1] else None
                dbias = sums.sum_dy.to(i.bias) if needed[4 * k + 2] else None
                results += [dx, dweight, dbias, dresiduals[k]]
        return tuple(results)


class _Transformed(_Normalize):
    """`_Normalize` in the form that torch.func accepts, which takes longer to call."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _set_up(ctx, inputs, output)


def _are_transformed(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch.func transforms one of the tensors; such a tensor has no memory of its own."""
    try:
        for t in tensors:
            if t is not None:
                t.data_ptr()
    except RuntimeError:
        return True
    return False


def _forward(
    batches: Sequence[BatchStatistics],
    communicator: Communicator,
    weighting: Weighting,
    options: Sequence[tuple[float, tuple[int, ...] | None, bool]],
    *tensors: Any,
) -> tuple[Tensor, ...]:
    ys = []
    with _without_autocast(tensors[0]):
        for i, (batch, (eps, axis, relu)) in enumerate(zip(batches, options, strict=True)):
            x, weight, bias, residual = tensors[4 * i : 4 * i + 4]
            y = statistics.normalize(
                x, batch, weight=weight, bias=bias, eps=eps, axis=axis, residual=residual, relu=relu
            )
            ys.append(y)
    return tuple(ys)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    batches, ctx.communicator, ctx.weighting, ctx.options, *tensors = inputs
    saved: list[Tensor | None] = []
    for i, (batch, y, (_, _, relu)) in enumerate(zip(batches, output, ctx.options, strict=True)):
        saved += [*tensors[4 * i : 4 * i + 3], y if relu else None, *batch]
    ctx.save_for_backward(*saved)


def _differentiable_backward(ctx: Any, gradients: Sequence[Gradient]) -> list[Tensor | None]:
    """Gradients of each x, weight and bias, as differentiable functions of each dy, x and weight.

    Runs the forward pass again from differentiable operations, its collective included, and lets
    autograd differentiate the result.
    """
    # Views, which are new tensors: if `x` depends on a parameter (a layer used twice), autograd
    # would otherwise differentiate through `x` too, which the outer graph does already.
    inputs = [
        i._replace(
            x=i.x.view_as(i.x),
            weight=None if i.weight is None else i.weight.view_as(i.weight),
            bias=None if i.bias is None else i.bias.view_as(i.bias),
        )
        for _, i, *_ in gradients
    ]
    xs = [i.x for i in inputs]
    communicator = _Differentiable(during(ctx.communicator, "second order", _dtypes(xs)))
    batches = statistics.batch_statistics_all(
        xs, communicator, weighting=ctx.weighting, axes=[i.axis for i in inputs]
    )
    ys = [
        statistics.normalize(i.x, batch, weight=i.weight, bias=i.bias, eps=i.eps, axis=i.axis)
        for i, batch in zip(inputs, batches, strict=True)
    ]
    tensors = [t for i in inputs for t in (i.x, i.weight, i.bias)]
    needed = [n for k, n in enumerate(ctx.needs_input_grad[4:]) if k % 4 < 3]
    sources = [t for t, n in zip(tensors, needed, strict=True) if t is not None and n]
    grads = iter(torch.autograd.grad(ys, sources, [g.dy for g in gradients], create_graph=True))
    return [next(grads) if n else None for n in needed]


class _Differentiable:
    """A communicator whose allreduce autograd can differentiate, any number of times."""

    def __init__(self, communicator: Communicator) -> None:
        self.wrapped = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def allreduce(self, x: Tensor, /) -> Tensor:
        return _AllReduce.apply(x, self.wrapped)

    def split(self, color: int, key: int = 0) -> Communicator:
        return _Differentiable(self.wrapped.split(color, key))


class _AllReduce(torch.autograd.Function):
    """y = sum over ranks of x. The backward pass is the same operation."""

    @staticmethod
    def forward(x: Tensor, communicator: Communicator) -> Tensor:
        return communicator.allreduce(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.communicator = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad_outputs[0], ctx.communicator), None


def _dtypes(xs: Sequence[Tensor]) -> Any:
    """The dtype that a message about `xs` announces: one dtype, or the names of several."""
    if len(xs) == 1:
        return xs[0].dtype
    return ", ".join(str(x.dtype).rpartition(".")[2] for x in xs)


_NOTHING = nullcontext()


def _without_autocast(x: Any) -> AbstractContextManager[Any]:
    kind = "cpu" if x.is_cpu else x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING
