"""Batch normalization of several inputs as one autograd node: one message each way.

For second derivatives and, in one process, for forward mode and torch.func, the forward pass is
made of operations that torch can differentiate in any mode, again and again. The ranks share one of
these operations, the sum of their messages; its gradient is the sum of the messages' gradients,
which is one more message.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multibn import kernels
from multibn._typing import Weighting
from multibn.communicators import Communicator, conversation
from multibn.communicators.outcomes import raise_for_nan_gradients
from multibn.engine import masks, recompute, statistics, step
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Gradient, Input
from multibn.kernels import generic
from multibn.kernels.layout import sizes_in_memory

_NOTHING = nullcontext()


def is_transformed() -> bool:
    """Whether torch.func transforms this call, or forward mode may have tangents for its inputs."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def without_autocast(x: Any, /) -> AbstractContextManager[Any]:
    """A context in which operations on tensors like `x` keep their dtypes."""
    if torch._C._is_any_autocast_enabled():
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return _NOTHING


def forward(
    inputs: Sequence[Input], communicator: Communicator, weighting: Weighting
) -> list[tuple[Tensor, BatchStatistics]]:
    """As `step.forward`, differentiably through the statistics, which have no gradient."""
    tensors: list[Tensor | None] = []
    needed = False
    for i in inputs:
        tensors += i.x, i.weight, i.bias, i.residual
        needed = needed or i.x.requires_grad
    if not torch.is_grad_enabled():
        needed = recompute.is_recording()
    batches: list[BatchStatistics] = []
    ys = _apply((inputs, communicator, weighting, needed, batches), *tensors)
    return list(zip(ys, batches, strict=True))


# torch saves the arrays of an input for the backward pass, and the node all else that the pass
# reads: the fields of these names in their order. `Input._replace` takes a microsecond.
_SAVED = "x", "weight", "bias", "mask"
_KEPT = [name for name in Input._fields if name not in (*_SAVED, "residual", "running")]
_kept = attrgetter(*_KEPT)
_in_order = itemgetter(
    *((*_KEPT, *_SAVED, "residual", "running").index(name) for name in Input._fields)
)


class _SyncBatchNorm(torch.autograd.Function):
    """The autograd node. Each half is collective; `batches` gets the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Sequence[Input], Communicator, Weighting, bool, list[BatchStatistics]],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # torch looks at each argument of this function, so that five are in one.
        inputs, communicator, weighting, needed, batches = call
        if not inputs[0].x.is_cpu:
            inputs = list(map(dense, inputs))
        with without_autocast(inputs[0].x):
            results = step.forward(inputs, communicator, weighting=weighting, needs_gradient=needed)
        options: list[Any] = []
        ys = []
        saved: list[Tensor | None] = []
        for n, (y, batch) in enumerate(results):
            i = inputs[n]
            # The statistics have no gradient, and torch takes a microsecond to save a tensor.
            options.append((batch, _kept(i)))
            saved += i.x, i.weight, i.bias, i.mask
            saved.append(y if i.relu and i.residual is not None else None)
            ys.append(y)
            batches.append(batch)
        ctx.layers = communicator, weighting, options
        ctx.save_for_backward(*saved)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad
        communicator, weighting, options = ctx.layers
        gradients = []
        for n, dy in enumerate(grad_outputs):
            x, weight, bias, mask, y = saved[5 * n : 5 * n + 5]
            batch, kept = options[n]
            i = Input(*_in_order((*kept, x, weight, bias, mask, None, None)))
            gradients.append(Gradient(dy, i, batch, y, needed[4 * n + 1]))
        results: list[Tensor | None] = [None]
        with without_autocast(saved[0]):
            if _needs_graph(grad_outputs):
                grads = _differentiable_backward(gradients, needed[1:], communicator, weighting)
                return None, *grads
            if torch.is_anomaly_enabled():
                find_nan(gradients, communicator)
            for n, (dx, dresidual, dweight, dbias) in enumerate(
                step.backward(gradients, communicator)
            ):
                if dresidual is None and needed[4 * n + 4]:
                    dresidual = generic.residual_gradient(gradients[n])
                results += dx, dweight, dbias, dresidual
        return tuple(results)


def dense(i: Input) -> Input:
    """The input with `x` copied where a GPU's kernels do not take such a layout.

    Array operations, which take any, are a hundred launches.
    """
    x = i.x
    if x.is_cpu or sizes_in_memory(x.shape, x.stride(), i.axis) is not None:
        return i
    return i._replace(x=x.contiguous())


# Function.apply without the questions that are for torch.func, which `functional` has asked.
_apply = super(torch.autograd.Function, _SyncBatchNorm).apply


def find_nan(gradients: Sequence[Gradient], communicator: Communicator) -> None:
    """Say on which ranks gradients of outputs have NaN. Collective, as the backward pass is."""
    if any(g.needs_dx for g in gradients):
        dys = [generic.masked(g.dy, g.input.mask) for g in gradients]
        raise_for_nan_gradients(communicator, any(bool(dy.isnan().any()) for dy in dys))


def _needs_graph(dys: Sequence[Tensor]) -> bool:
    """Whether torch is to differentiate the backward pass (`create_graph`), or to batch it."""
    return (
        torch.is_grad_enabled()
        or is_transformed()
        or any(map(torch._C._functorch.is_legacy_batchedtensor, dys))
    )


def _differentiable_backward(
    gradients: Sequence[Gradient],
    needed: Sequence[bool],
    communicator: Communicator,
    weighting: Weighting,
) -> list[Tensor | None]:
    """Gradients of each x, weight, bias and residual, as differentiable functions.

    Runs the forward pass again from differentiable operations, its collective included, and lets
    autograd differentiate the result.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs: list[Input] = []
        dys: list[Tensor] = []
        sources: list[Any] = []
        for n, g in enumerate(gradients):
            # Views, which are new tensors: if `x` depends on a parameter (a layer used twice),
            # autograd would otherwise differentiate through `x` too, which the outer graph does.
            i = g.input
            if i.relu and g.y is None:  # the output, bit for bit, and so its signs
                with torch.no_grad():
                    g = g._replace(y=kernels.select(i.x).normalize(i, g.batch))
            views: list[Any] = [
                None if t is None else t.view_as(t) for t in (i.x, i.weight, i.bias)
            ]
            x, weight, bias = views
            inputs.append(i._replace(x=x, weight=weight, bias=bias, relu=False))
            dys.append(generic.residual_gradient(g))
            sources += compress(views, needed[4 * n : 4 * n + 3])
        ys, _ = normalize_all(inputs, communicator, weighting, phase="second order")
        grads = iter(torch.autograd.grad(ys, sources, dys, create_graph=create_graph))
    results: list[Tensor | None] = []
    for n, dy in enumerate(dys):
        results += [next(grads) if need else None for need in needed[4 * n : 4 * n + 3]]
        results.append(dy if needed[4 * n + 3] else None)
    return results


def differentiable_forward(
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
                step.move(i.running, batch, masks.weigh(i, count, "element")[1])
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
    if is_transformed() or torch._C._functorch.is_legacy_batchedtensor(x):
        raise NotImplementedError(
            "torch.func, forward mode, `vectorize=True` in torch.autograd.functional and "
            "`is_grads_batched=True` in torch.autograd.grad work for a layer of one process: got "
            f"{num_ranks} ranks that share statistics. Call torch.autograd.grad, with "
            "create_graph=True for second derivatives, or pass process_group=SingleProcess()."
        )
    return x
