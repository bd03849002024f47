"""Batch normalization of several inputs as one autograd node: one message each way."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multibn import recompute, statistics
from multibn._typing import Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import during
from multibn.statistics import BatchStatistics, GradientSums
from multibn.torch_backend import _differentiable
from multibn.torch_backend._input import Input as Input
from multibn.torch_backend._input import dtypes, without_autocast


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
        with without_autocast(xs[0]):
            return statistics.batch_statistics_all(
                xs,
                during(communicator, "forward", dtypes(xs)),
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
    return _Normalize.apply(batches, communicator, weighting, options, *tensors)


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
    communicator = during(communicator, "backward", dtypes(xs))
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
    def forward(
        ctx: Any,
        batches: Sequence[BatchStatistics],
        communicator: Communicator,
        weighting: Weighting,
        options: Sequence[tuple[float, tuple[int, ...], bool]],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        ctx.communicator, ctx.weighting, ctx.options = communicator, weighting, options
        ys = []
        saved: list[Tensor | None] = []
        with without_autocast(tensors[0]):
            for i, (batch, (eps, axis, relu)) in enumerate(zip(batches, options, strict=True)):
                x, weight, bias, residual = tensors[4 * i : 4 * i + 4]
                y = statistics.normalize(
                    x,
                    batch,
                    weight=weight,
                    bias=bias,
                    eps=eps,
                    axis=axis,
                    residual=residual,
                    relu=relu,
                )
                ys.append(y)
                saved += [x, weight, bias, y if relu else None, *batch]
        ctx.save_for_backward(*saved)
        return tuple(ys)

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
        with without_autocast(saved[0]):
            if _is_transformed(grad_outputs):
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


def _is_transformed(dys: Sequence[Tensor]) -> bool:
    """Whether torch is to differentiate the backward pass (`create_graph`), or to batch it."""
    return (
        torch.is_grad_enabled()
        or _differentiable.is_needed()
        or any(map(torch._C._functorch.is_legacy_batchedtensor, dys))
    )


def _differentiable_backward(ctx: Any, gradients: Sequence[Gradient]) -> list[Tensor | None]:
    """Gradients of each x, weight and bias, as differentiable functions of each dy, x and weight.

    Runs the forward pass again from differentiable operations, its collective included, and lets
    autograd differentiate the result.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
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
        ys, _ = _differentiable.normalize_all(
            inputs, ctx.communicator, ctx.weighting, phase="second order"
        )
        tensors = [t for i in inputs for t in (i.x, i.weight, i.bias)]
        needed = [n for k, n in enumerate(ctx.needs_input_grad[4:]) if k % 4 < 3]
        sources = [t for t, n in zip(tensors, needed, strict=True) if t is not None and n]
        dys = [g.dy for g in gradients]
        grads = iter(torch.autograd.grad(ys, sources, dys, create_graph=create_graph))
    return [next(grads) if n else None for n in needed]
