"""Batch normalization of several inputs as one autograd node: one message each way."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from multibn import step
from multibn._typing import Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import raise_for_nan_gradients
from multibn.kernels import generic
from multibn.statistics import BatchStatistics
from multibn.step import Gradient, Input
from multibn.torch_backend import _differentiable
from multibn.torch_backend._input import without_autocast


def forward(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting
) -> list[tuple[Tensor, BatchStatistics]]:
    """As `step.forward`, differentiably through the statistics, which have no gradient."""
    tensors: list[Tensor | None] = []
    for x, weight, bias, _, _, residual, *_ in inputs:
        tensors += (x, weight, bias, residual)
    batches: list[BatchStatistics] = []
    ys = _SyncBatchNorm.apply(inputs, communicator, weighting, batches, *tensors)
    return list(zip(ys, batches, strict=True))


class _SyncBatchNorm(torch.autograd.Function):
    """The autograd node. Each half is collective; `batches` gets the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Sequence[Input],
        communicator: Communicator,
        weighting: Weighting,
        batches: list[BatchStatistics],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with without_autocast(inputs[0].x):
            results = step.forward(inputs, communicator, weighting=weighting)
        ctx.communicator, ctx.weighting = communicator, weighting
        options = []
        ys = []
        saved: list[Tensor | None] = []
        for (x, weight, bias, eps, axis, residual, relu, _, mask), (y, batch) in zip(
            inputs, results, strict=True
        ):
            options.append((eps, axis, relu))
            saved += (x, weight, bias, mask, y if relu and residual is not None else None, *batch)
            ys.append(y)
            batches.append(batch)
        ctx.options = options
        ctx.save_for_backward(*saved)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        gradients = []
        for n, (dy, (eps, axis, relu)) in enumerate(zip(grad_outputs, ctx.options, strict=True)):
            x, weight, bias, mask, y, *batch = saved[9 * n : 9 * n + 9]
            i = Input(x, weight, bias, eps, axis, relu=relu, mask=mask)
            gradients.append(Gradient(dy, i, BatchStatistics(*batch), needed[4 * n], y))
        results: list[Tensor | None] = [None] * 4
        with without_autocast(saved[0]):
            if _is_transformed(grad_outputs):
                return (*results, *_differentiable_backward(ctx, gradients))
            if torch.is_anomaly_enabled():
                find_nan(gradients, ctx.communicator)
            for n, gradient in enumerate(step.backward(gradients, ctx.communicator)):
                dx, dresidual, dweight, dbias = gradient
                if dresidual is None and needed[4 * n + 3]:
                    dresidual = generic.masked(grad_outputs[n], gradients[n].input.mask)
                results += (dx, dweight, dbias, dresidual)
        return tuple(results)


def find_nan(gradients: Sequence[Gradient], communicator: Communicator) -> None:
    """Say on which ranks gradients of outputs have NaN. Collective, as the backward pass is."""
    if any(g.needs_dx for g in gradients):
        dys = [generic.masked(g.dy, g.input.mask) for g in gradients]
        raise_for_nan_gradients(communicator, any(bool(dy.isnan().any()) for dy in dys))


def _is_transformed(dys: Sequence[Tensor]) -> bool:
    """Whether torch is to differentiate the backward pass (`create_graph`), or to batch it."""
    return (
        torch.is_grad_enabled()
        or _differentiable.is_needed()
        or any(map(torch._C._functorch.is_legacy_batchedtensor, dys))
    )


def _differentiable_backward(ctx: Any, gradients: Sequence[Gradient]) -> list[Tensor | None]:
    """Gradients of each x, weight, bias and residual, as differentiable functions.

    Runs the forward pass again from differentiable operations, its collective included, and lets
    autograd differentiate the result.
    """
    create_graph = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[4:]
    with torch.enable_grad():
        inputs: list[Input] = []
        dys: list[Tensor] = []
        sources: list[Any] = []
        for n, (dy, i, _, _, y) in enumerate(gradients):
            # Views, which are new tensors: if `x` depends on a parameter (a layer used twice),
            # autograd would otherwise differentiate through `x` too, which the outer graph does.
            views = [None if t is None else t.view_as(t) for t in i[:3]]
            i = i._replace(x=views[0], weight=views[1], bias=views[2])
            if y is not None:  # the residual is gone; `y` has the signs
                i, dy = i._replace(relu=False), torch.where(y.detach() > 0, dy, 0.0)
            inputs.append(i)
            dys.append(generic.masked(dy, i.mask))
            sources += compress(views, needed[4 * n : 4 * n + 3])
        ys, _ = _differentiable.normalize_all(
            inputs, ctx.communicator, ctx.weighting, phase="second order"
        )
        grads = iter(torch.autograd.grad(ys, sources, dys, create_graph=create_graph))
    results: list[Tensor | None] = []
    for n, dy in enumerate(dys):
        results += [next(grads) if need else None for need in needed[4 * n : 4 * n + 3]]
        results.append(dy if needed[4 * n + 3] else None)
    return results
