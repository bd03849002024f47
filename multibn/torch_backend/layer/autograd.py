"""Batch normalization as an autograd node, with one allreduce each way.

For second derivatives and, in one process, for forward mode and torch.func, the forward pass is
composed of differentiable torch operations. One of these is the allreduce, whose gradient is an
allreduce of the ranks' gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from multibn import kernels
from multibn._arrays import values
from multibn._typing import RunningVar, Weighting
from multibn.communicators import Communicator, layer_communicator
from multibn.communicators.nonfinite import layer_of, raise_for_nan_gradients
from multibn.engine import masks, recompute
from multibn.engine.plan import Gradient, NormArgs, Plan
from multibn.engine.running import StepAccumulator, update_running
from multibn.engine.statistics import BatchStatistics
from multibn.kernels import Running, reference
from multibn.kernels.layout import channels, sizes_in_memory
from multibn.kernels.spec import PackedStatistics, options_of, unpack
from multibn.torch_backend._torch_private import (
    MAKE_FX,
    TANGENT_LEVEL,
    call_context,
    get_dispatch_mode,
    get_tracing_state,
    is_any_autocast_enabled,
    is_legacy_batchedtensor,
    not_compiled,
    transforms_are_active,
    without_dispatch_modes,
)
from multibn.torch_backend.layer import dtensors

_NULL_CONTEXT = nullcontext()


def plan_key(args: NormArgs, weighting: Weighting) -> tuple[Any, ...] | None:
    """Return the cache key of the plan for `args`, or None if the call must not be cached.

    A cached plan under this key implies that input, parameters and running statistics were
    validated. tests/torch_backend/layer/test_guard.py lists what the key must depend on.
    """
    x, weight, bias, residual, running = args.x, args.weight, args.bias, args.residual, args.running
    if (
        type(x) is not Tensor
        or x.layout is not torch.strided
        or x.is_nested
        or transforms_are_active()
        or getattr(forward_ad, TANGENT_LEVEL, -1) >= 0  # forward mode
        or get_dispatch_mode(MAKE_FX)
        or get_tracing_state() is not None
    ):
        return None
    needs_grad = x.requires_grad if torch.is_grad_enabled() else recompute.is_recording()
    key: tuple[Any, ...] = (
        x.shape, x.stride(), x.dtype, x.device, needs_grad, *options_of(args), weighting,
        args.mask is None, type(running), weight is None, call_context(),
    )  # fmt: skip
    if weight is not None:
        key += type(weight), weight.shape, weight.dtype, weight.device
    if bias is not None:
        key += type(bias), bias.shape, bias.dtype, bias.device
    if type(running) is Running:
        mean, var = running.mean, running.var
        key += mean.shape, mean.dtype, mean.device, var.shape, var.dtype, var.device
    if residual is not None:
        if type(residual) is not Tensor or residual.layout is not torch.strided:
            return None
        key += residual.is_nested or residual.shape, residual.dtype, residual.device
    return key


def running_stats_of(
    bn: _BatchNorm, convention: RunningVar, momentum: float | None = None
) -> Running | StepAccumulator | None:
    """Return the running statistics of `bn` that a training pass updates in place, or None.

    Inside of `step_statistics`, return its accumulator, which keeps `momentum`. Pass `momentum` if
    the caller has already incremented `num_batches_tracked`.
    """
    if not bn.track_running_stats:
        return None
    step_accumulator: StepAccumulator | None = getattr(bn, "step_accumulator", None)
    if step_accumulator is not None:
        if momentum is not None:
            step_accumulator.momentum = momentum
        return step_accumulator
    buffers = bn._buffers  # faster than attributes of a module
    try:
        mean, var = buffers["running_mean"], buffers["running_var"]
        counter = buffers["num_batches_tracked"]
    except KeyError:  # replaced by frozen parameters or plain attributes
        mean, var, counter = bn.running_mean, bn.running_var, bn.num_batches_tracked
    if mean is None or var is None:
        return None
    if type(mean) is not Tensor:
        mean, var, counter = map(dtensors.local_buffer, (mean, var, counter))
    if momentum is not None:
        return Running(mean, var, momentum, convention)
    return Running(mean, var, bn.momentum, convention, counter)


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode AD is active."""
    return transforms_are_active() or getattr(forward_ad, TANGENT_LEVEL, -1) >= 0


@contextmanager
def without_autocast(x: Any, /) -> Iterator[None]:
    """Turn autocast off for the device of `x`.

    Entering torch.autocast would take longer than a layer's kernels.
    """
    kind = x.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    try:
        if is_on:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        if is_on:
            torch.set_autocast_enabled(kind, True)


def disable_dispatch_modes_in_recompute() -> AbstractContextManager[Any]:
    """Return a context that hides a layer's operations from selective checkpointing.

    torch matches the operations of a pass and of its recomputation by count, and a layer runs
    different operations in a recomputation.
    """
    if torch.compiler.is_compiling() or not recompute.state.stack or get_dispatch_mode(MAKE_FX):
        return _NULL_CONTEXT
    return without_dispatch_modes()


def needs_gradient(x: Tensor) -> bool:
    """Return whether a backward pass may follow a forward pass over `x`."""
    return x.requires_grad if torch.is_grad_enabled() else recompute.is_recording()


class SyncBatchNormFunction(torch.autograd.Function):
    """The autograd node, from the input to (output, statistics without a gradient). Collective.

    The plan is the engine's, or in compiled code `compiled._Traced`. Compiled outputs may differ
    from the kernels' in the last digit, and therefore in their signs before a ReLU.
    """

    @staticmethod
    def forward(
        ctx: Any, plan_and_args: tuple[Any, NormArgs], *_: Tensor | None
    ) -> tuple[Tensor, PackedStatistics]:
        # Plan and args are one argument, because `apply` inspects each argument.
        plan, args = plan_and_args
        is_eager = type(plan) is Plan
        if is_eager and not args.x.is_cpu:
            args = with_kernel_layout(args)
        if (is_eager and recompute.state.stack) or is_any_autocast_enabled():
            modes = disable_dispatch_modes_in_recompute() if is_eager else _NULL_CONTEXT
            with modes, without_autocast(args.x):
                y, batch = plan.forward(args)
        else:
            y, batch = plan.forward(args)
        # Not save_for_backward for the statistics: they have no gradient, and it takes 1 us each.
        ctx.plan_and_batch = plan, batch
        output = y if args.relu and (args.residual is not None or not is_eager) else None
        ctx.save_for_backward(args.x, args.weight, args.bias, args.mask, output)
        return y, batch

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if is_any_autocast_enabled():
            with without_autocast(grad_outputs[0]):
                return _gradients(ctx, grad_outputs[0])
        return _gradients(ctx, grad_outputs[0])


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `SyncBatchNormFunction`. Collective."""
    x, weight, bias, mask, y = ctx.saved_tensors
    _, *needed = ctx.needs_input_grad
    plan, batch = ctx.plan_and_batch
    args = NormArgs(x, weight, bias, *plan.options, mask)  # type: ignore[call-arg]
    g = Gradient(dy, args, batch, y, needed[0])
    # `create_graph`, torch.func and `is_grads_batched` need differentiable operations.
    if torch.is_grad_enabled() or is_transformed() or is_legacy_batchedtensor(dy):
        return None, *_differentiable_backward(g, needed, plan)
    if torch.is_anomaly_enabled() and type(plan) is Plan:
        raise_for_nan_gradient(g, plan.communicator)
    dx, dresidual, dweight, dbias = plan.backward(g)
    if dresidual is None and needed[3]:
        dresidual = reference.residual_gradient(g)
    return None, dx, dweight, dbias, dresidual


def with_kernel_layout(args: NormArgs) -> NormArgs:
    """Return `args`, with a contiguous copy of `x` if a GPU's kernels do not support its layout.

    `reference` supports any strides, but takes about a hundred kernel launches.
    """
    x = args.x
    if x.is_cpu or sizes_in_memory(x.shape, x.stride(), args.axis) is not None:
        return args
    return args._replace(x=x.contiguous())


# Function.apply without its checks for torch.func, which `functional` has done.
apply = super(torch.autograd.Function, SyncBatchNormFunction).apply


def raise_for_nan_gradient(g: Gradient, communicator: Communicator) -> None:
    """Raise, and name the ranks, if the gradient of the output has NaN on any. Collective."""
    if g.needs_dx:
        dy = reference.masked(g.dy, g.input.mask)
        raise_for_nan_gradients(communicator, bool(dy.isnan().any()))


def _differentiable_backward(g: Gradient, needed: Sequence[bool], plan: Any) -> list[Tensor | None]:
    """Return the gradients of x, weight, bias and residual with a graph of their own.

    Repeats the forward pass, including its allreduce, as differentiable operations, and calls
    torch.autograd.grad on the result.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        args = g.input
        if args.relu and g.y is None:  # recompute the output exactly, as its signs matter
            with torch.no_grad():
                g = g._replace(y=kernels.select(args.x).normalize(args, g.batch))
        dy = reference.residual_gradient(g)
        if not any(needed[:3]):
            return [None, None, None, dy]
        # Views are new tensors. Otherwise, if `x` depends on a parameter (a layer used twice),
        # autograd would also differentiate through `x`, which the outer graph does.
        views: Any = [None if t is None else t.view_as(t) for t in (args.x, args.weight, args.bias)]
        x, weight, bias = views
        viewed = args._replace(x=x, weight=weight, bias=bias, relu=False)
        y, _ = normalize(viewed, plan.communicator, plan.weighting, phase="second order")
        sources = list(compress(views, needed))
        grads = iter(torch.autograd.grad(y, sources, dy, create_graph=create_graph))
    return [next(grads) if need else None for need in needed[:3]] + [dy if needed[3] else None]


@not_compiled
def differentiable_forward(
    args: NormArgs, communicator: Communicator, weighting: Weighting
) -> tuple[Tensor, BatchStatistics]:
    """Return the normalized input and the statistics, detached. Collective."""
    # A recomputation consumes the recorded statistics, which have no graph, and computes new ones.
    is_recomputing = recompute.replayed(channels(args.x.shape, args.axis)) is not None
    y, batch = normalize(args, communicator, weighting, phase="forward")
    batch = BatchStatistics(*[part.detach() for part in batch])
    if not is_recomputing:
        recompute.record(batch, args, Plan(args, communicator, weighting=weighting))
        update_running(args.running, batch, masks.weigh(args, "element")[1])
    return y, batch


def normalize(
    args: NormArgs, communicator: Communicator, weighting: Weighting, *, phase: str
) -> tuple[Tensor, BatchStatistics]:
    """Return the normalized input and the statistics, both differentiable.

    Collective, as is each derivative.
    """
    differentiable: Any = _Differentiable(communicator, phase, args.x.dtype)
    with without_autocast(args.x):
        args = args._replace(running=None)
        plan = Plan(args, differentiable, weighting=weighting, verbs=reference)
        y, batch = plan.forward(args, recorded=False)
    mean, var, *scalars = unpack(batch)
    # The scalars have no gradient, and are equal in all of vmap's batch.
    scalars = [values(v).detach().reshape(-1)[0] for v in scalars]
    return y, BatchStatistics(mean, var, *scalars)


class _Differentiable:
    """A layer's communicator in one phase, with a differentiable allreduce."""

    def __init__(self, communicator: Communicator, phase: str, dtype: Any) -> None:
        self.communicator, self.phase, self.dtype = communicator, phase, dtype
        self.layer = layer_of(communicator)
        self.rank, self.size = communicator.rank, communicator.size
        self.repeats = phase == "second order"  # the forward pass has already been checked

    def allreduce(self, x: Tensor, /, phase: str = "") -> Tensor:
        """Sum over the ranks. The gradient is the sum of the ranks' gradients."""
        if self.size == 1:  # no communication: torch can differentiate and transform all of it
            return x
        if is_transformed() or get_dispatch_mode(MAKE_FX) or is_legacy_batchedtensor(x):
            raise NotImplementedError(
                "torch.func, make_fx, forward mode, `vectorize=True` in torch.autograd.functional "
                "and `is_grads_batched=True` in torch.autograd.grad are supported only in one "
                f"process: got {self.size} ranks that share statistics. Call torch.autograd.grad, "
                "with create_graph=True for second derivatives, or pass "
                "process_group=SingleProcess()."
            )
        return _AllReduce.apply(x, self, phase or self.phase)


class _AllReduce(torch.autograd.Function):
    """The autograd node of `_Differentiable.allreduce`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: _Differentiable, phase: str) -> Tensor:
        ctx.communicator = communicator
        layer, dtype = communicator.communicator, communicator.dtype
        return layer_communicator.for_phase(layer, phase, dtype, x.shape[0]).allreduce(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicator.allreduce(grad_outputs[0], "gradient"), None, None
