"""A layer's passes as torch.compile sees them: torch's operations, around an operator per message.

The compiler makes code of the passes, and fuses them with the operations around the layer. It calls
the operator `multibn::allreduce` without looking inside, in the order of the layers. Meta and fake
tensors take the same way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from multibn._arrays import is_abstract
from multibn._typing import Weighting
from multibn.communicators import Communicator
from multibn.engine import masks
from multibn.engine.population import Pool
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Gradient, Input
from multibn.kernels import Running, generic
from multibn.kernels.generic_passes import num_elements
from multibn.torch_backend.layer import differentiable, functional, operators
from multibn.torch_backend.layer.compiled_passes import CompiledPasses
from multibn.torch_backend.layer.differentiable import without_autocast
from multibn.torch_backend.layer.operators import register as register

_PASSES = CompiledPasses()


def takes(x: Any, /) -> bool:
    """Whether `forward` is to take `x`: in compiled code, and without data."""
    if torch.compiler.is_compiling():
        return True
    return isinstance(x, FakeTensor) or getattr(x, "is_meta", False)


def forward_all(
    inputs: Sequence[Input],
    num_channels: Sequence[int],
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
) -> list[tuple[Tensor, BatchStatistics]]:
    """As `functional.forward_all`; in compiled code and without data, each input has a message.

    Under torch.func and in forward mode the pass runs without compilation. Compiled code cannot
    tell whether it runs in a recomputation. There, a batch has a count of 0, by which running
    statistics do not move.

    Raises
    ------
    RuntimeError
        In torch.export: the program would hold the communicator of this process.
    """
    compiling = torch.compiler.is_compiling()
    # Not is_exporting(): the compiler of torch 2.11 takes that for true in torch.compile as well.
    if compiling and getattr(torch.compiler, "_is_exporting_flag", False):
        raise RuntimeError(
            "torch.export cannot export layers that share statistics in training: the program "
            "would need the processes of this run. Call model.eval() first, or export a copy of "
            "the model after revert_sync_batchnorm."
        )
    # Not by `takes`: where this frame is not compiled, the compiler may yet take that one.
    without_data = isinstance(inputs[0].x, FakeTensor) or getattr(inputs[0].x, "is_meta", False)
    if differentiable.is_needed() if compiling else not without_data:
        return functional.forward_all(inputs, num_channels, communicator, weighting=weighting)
    results = []
    for i, n in zip(inputs, num_channels, strict=True):
        if not compiling:
            functional.check_input(i.x, n)
        x, weight, bias, eps, axis, residual, relu, running, mask = i
        options = eps, axis, relu, id(communicator), weighting
        y, *numbers = torch.ops.multibn.forward(x, weight, bias, residual, mask, n, *options)
        batch = BatchStatistics(*numbers)
        count: Any = x.numel() // max(batch.mean.numel(), 1) if mask is None else mask.sum()
        if isinstance(running, Pool):
            running.add(batch, local_count=count)
        elif running is not None:
            counted = (count, None) if mask is None else (None, count.to(batch.mean))
            torch.ops.multibn.move(*running, *batch[:3], *counted)
        results.append((y, batch))
    return results


def mask_of(
    x: Any, mask: Any, lengths: Any, num_channels: Sequence[int], communicator: Communicator
) -> Tensor | None:
    """As `functional.mask_of`; in compiled code, whose messages have one input, an operator."""
    if (mask is None and lengths is None) or not torch.compiler.is_compiling():
        return functional.mask_of(x, mask, lengths, num_channels, communicator)
    checked: Tensor = torch.ops.multibn.mask(x, mask, lengths, num_channels[0], id(communicator))
    return checked


# Dynamo writes down the calls of `forward` and `move`; what follows sees the operations inside.
@operators.operator("CompositeImplicitAutograd")
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    num_channels: int,
    eps: float,
    axis: Sequence[int],
    relu: bool,
    communicator: int,
    weighting: str,
) -> operators.Results:
    axis = tuple(axis)
    i = Input(x, weight, bias, eps, axis, residual, relu, mask=mask)
    if not is_abstract(x):  # torch.compile(backend="eager")
        return operators.run(i, num_channels, communicator, weighting)
    try:
        functional.check_input(x, num_channels)
        if not x.is_meta:
            functional.check_options(i)
    except (TypeError, ValueError):  # which all ranks are to learn when the code runs
        refuse = torch.ops.multibn.refuse
        with torch.no_grad():
            return refuse(x, weight, bias, residual, num_channels, axis, communicator)
    return _SyncBatchNorm.apply(*i[:7], mask, communicator, weighting)


class _SyncBatchNorm(torch.autograd.Function):
    """The autograd node, as `autograd` has one, made of operations that are compiled."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        axis: tuple[int, ...],
        residual: Tensor | None,
        relu: bool,
        mask: Tensor | None,
        communicator: int,
        weighting: Weighting,
    ) -> tuple[Tensor, ...]:
        ctx.about = x.shape, axis, mask is not None, x.dtype, communicator
        ctx.options = eps, axis, relu
        i = Input(x, weight, bias, eps, axis, residual, relu, mask=mask)
        with without_autocast(x):
            rank_weight, count = masks.weigh(i, num_elements(x, axis), weighting)
            payload = generic.begin_forward(i, rank_weight, count, passes=_PASSES)
            with _marked(CheckpointPolicy.MUST_SAVE):
                summed = torch.ops.multibn.allreduce(payload, "forward", *ctx.about)
            y, batch, _ = generic.finish_forward(i, summed, rank_weight, count, passes=_PASSES)
        has_residual = relu and residual is not None
        ctx.save_for_backward(x, weight, bias, mask, y if has_residual else None, *batch)
        ctx.mark_non_differentiable(*batch)
        return y, *batch

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mask, y, *batch = ctx.saved_tensors
        dy, *_ = grad_outputs
        eps, axis, relu = ctx.options
        i = Input(x, weight, bias, eps, axis, relu=relu, mask=mask)
        g = Gradient(dy, i, BatchStatistics(*batch), y)
        dx = dresidual = None
        here = CheckpointPolicy.PREFER_RECOMPUTE
        _compare_here()
        with without_autocast(x):
            with _marked(here):
                payload, dweight, dbias = generic.begin_backward(g, passes=_PASSES)
            if ctx.needs_input_grad[0]:
                summed = torch.ops.multibn.allreduce(payload, "backward", *ctx.about)
                with _marked(here):
                    dx, dresidual = generic.finish_backward(g, summed, passes=_PASSES)
        if dresidual is None and ctx.needs_input_grad[5]:
            dresidual = generic.residual_gradient(g)
        return dx, dweight, dbias, None, None, dresidual, *[None] * 4


@contextmanager
def _marked(policy: CheckpointPolicy) -> Iterator[None]:
    """Context whose operations run in the pass that `policy` says, once the graph is in two.

    With MUST_SAVE in the forward pass only: torch marks all operations of a checkpoint to be
    repeated in the backward pass, and cannot repeat effects. With PREFER_RECOMPUTE in the backward
    pass, for the comparisons of a ReLU, see `_compare_here`.
    """
    nodes = _nodes()
    before = len(nodes)
    yield
    for node in islice(reversed(nodes), len(nodes) - before):
        node.meta["recompute"] = policy


def _compare_here() -> None:
    """Let the gradient of a ReLU behind the layer compare in the backward pass, on a CPU.

    The compiler would otherwise compare in the forward pass and keep Booleans, which are smaller
    than numbers; inductor's code for gcc writes and reads these one by one, with a branch each.
    """
    for node in reversed(_nodes()):
        if torch.ops.multibn.allreduce.default in node.args:  # the message before
            return
        if node.target is torch.ops.aten.le.Scalar:
            y = node.args[0]
            while y.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
                y = y.args[0]
            if y.target is torch.ops.aten.relu.default and y.meta["val"].is_cpu:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _nodes() -> Any:
    """The operations that the compiler has written down so far."""
    mode: Any = get_proxy_mode()
    return () if mode is None else mode.tracer.graph.nodes


@operators.operator(
    "CompositeImplicitAutograd", mutates=("running_mean", "running_var", "num_batches")
)
def _move(
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float | None,
    convention: str,
    num_batches: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    local_count: int | None,
    local_tensor: Tensor | None,
) -> None:
    kind: Any = convention  # an operator has no Literals
    running = Running(running_mean, running_var, momentum, kind, num_batches)
    generic.move(running, mean, var, count, local_tensor if local_count is None else local_count)
