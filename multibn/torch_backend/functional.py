"""Synchronized batch normalization as a differentiable function of tensors."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multibn import recompute, statistics
from multibn._typing import Weighting
from multibn.communicators import Communicator, as_communicator
from multibn.communicators.checked import Checked, during
from multibn.statistics import BatchStatistics, GradientSums


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    /,
    *,
    process_group: Any = None,
    eps: float = 1e-5,
    weighting: Weighting = "element",
) -> tuple[Tensor, BatchStatistics]:
    """Normalize `x` by the statistics of the batch that all ranks hold together.

    Collective: every rank of `process_group` must call it, a rank with an empty batch included, and
    must run the backward pass if any does. One allreduce of 2C+4 float64 numbers each way, none
    backward if `x` needs no gradient.

    Parameters
    ----------
    x
        Shape `(N, C, *spatial)`, floating-point, any memory format. N and the spatial sizes may
        differ between ranks and may be 0.
    weight, bias
        Shape `(C,)`, or None for 1 and 0. Their gradients are this rank's sums, as those of
        torch.nn.SyncBatchNorm: DistributedDataParallel averages them like any other gradient.
    process_group
        Anything that `multibn.as_communicator` takes.
    eps
        Added to the variance.
    weighting
        What a rank counts for, see `multibn.aggregate`.

    Returns
    -------
    y
        Same shape, dtype and memory format as `x`.
    batch
        Mean, biased variance and count of the whole batch, float64, without a gradient.

    Raises
    ------
    TypeError
        If `x` is not floating-point, or `process_group` is no communicator.
    ValueError
        If the shapes do not fit, or all ranks hold one value per channel together.
    RuntimeError
        On the other ranks, if one rank's input was refused.

    Notes
    -----
    Differentiating twice (`create_graph=True`) is exact over ranks; it repeats the forward's
    collective in the backward pass. `x` must need a gradient on all ranks or on none: ranks where
    it does wait for the others in the backward pass.
    """
    communicator = Checked(as_communicator(process_group), lambda: "sync_batch_norm")
    shapes = [tuple(p.shape) for p in (weight, bias) if p is not None]
    if len(set(shapes)) > 1 or any(len(shape) != 1 for shape in shapes):
        error = ValueError(f"`weight` and `bias` must have the same shape (C,): got {shapes}.")
        _refuse(error, x, None, communicator)
    num_channels = shapes[0][0] if shapes else None
    return forward(x, weight, bias, num_channels, communicator, eps=eps, weighting=weighting)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_channels: int | None,
    communicator: Communicator,
    /,
    *,
    eps: float,
    weighting: Weighting,
    axis: tuple[int, ...] | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, BatchStatistics]:
    """`check_input`, `batch_statistics` and `normalize`. Collective."""
    _refuse_ddp_join(communicator)
    check_input(x, num_channels, communicator)
    if residual is not None:
        _check_residual(residual, x, communicator)
    batch = batch_statistics(x, communicator, weighting=weighting, axis=axis)
    y = normalize(
        x,
        weight,
        bias,
        batch,
        communicator,
        eps=eps,
        weighting=weighting,
        axis=axis,
        residual=residual,
        relu=relu,
    )
    return y, batch


def batch_statistics(
    x: Tensor,
    communicator: Communicator,
    /,
    *,
    weighting: Weighting = "element",
    axis: tuple[int, ...] | None = None,
) -> BatchStatistics:
    """Statistics of the whole batch over `axis` (default: all but 1), without a gradient.

    Collective, unless they are replayed (see `multibn.recompute`).
    """
    axis = statistics.reduced_axes(x.ndim) if axis is None else axis

    def compute() -> BatchStatistics:
        with torch.no_grad(), _without_autocast(x):
            return statistics.batch_statistics(
                x.detach(),
                during(communicator, "forward", x.dtype),
                weighting=weighting,
                axis=axis,
            )

    return recompute.taped(compute, statistics.channels(x, axis))


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: BatchStatistics,
    communicator: Communicator,
    /,
    *,
    eps: float,
    weighting: Weighting = "element",
    axis: tuple[int, ...] | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalize `x` by `batch`, differentiating through the statistics. Collective backward.

    `weight` and `bias` have the shape of the axes that `axis` leaves: `(C,)` by default. Then plus
    `residual`, a tensor like `x`, then ReLU, where asked for.
    """
    y: Tensor = _Normalize.apply(
        x, weight, bias, residual, batch, communicator, eps, weighting, axis, relu
    )
    return y


def normalize_by_running(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    /,
    *,
    eps: float,
) -> Tensor:
    """Normalize `x` by running statistics, as in evaluation. Not collective."""
    if all(t is None or t.dtype == x.dtype for t in (weight, bias, running_mean)):
        return F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    # Dtypes that training takes and torch's function does not.
    mean, var = running_mean.double(), running_var.double()
    batch = BatchStatistics(mean, var, count=mean.new_zeros(()), element_weight=mean.new_zeros(()))
    return statistics.normalize(x, batch, weight=weight, bias=bias, eps=eps)


def add_relu(y: Tensor, residual: Tensor | None, relu: bool, /) -> Tensor:
    """`y` plus `residual`, then ReLU, where asked for, as operations of their own."""
    y = y if residual is None else y + residual
    return y.relu() if relu else y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    batch: BatchStatistics,
    communicator: Communicator,
    /,
    *,
    eps: float,
    needs_dx: bool,
    axis: tuple[int, ...] | None = None,
) -> tuple[Tensor | None, GradientSums]:
    """Gradient of `x`, and this rank's sums. Collective if `needs_dx`."""
    local = statistics.backward_sums(dy, x, batch, eps=eps, axis=axis)
    if not needs_dx:
        return None, local
    sums = statistics.aggregate_sums(local, during(communicator, "backward", x.dtype))
    return (
        statistics.input_gradient(dy, x, batch, sums, weight=weight, eps=eps, axis=axis),
        local,
    )


def in_recomputing() -> bool:
    """Whether this forward pass is one that runs again (see `multibn.recompute`)."""
    return recompute.in_recomputing()


def check_input(x: Any, num_channels: int | None, communicator: Communicator, /) -> None:
    """Raise unless `x` is a floating-point tensor of shape `(N, num_channels, *spatial)`.

    Then, and only then, collective: the other ranks are told, so that they raise too instead of
    waiting. `num_channels=None` takes any number but 0.
    """
    error = _input_error(x, num_channels)
    if error is not None:
        _refuse(error, x, num_channels, communicator)


def _refuse_ddp_join(communicator: Communicator) -> None:
    """Raise inside DistributedDataParallel.join, on all ranks, before anything is communicated.

    A rank that has run out of data answers the collectives of DistributedDataParallel only, and
    would answer a layer's with one of those.
    """
    ddp: Any = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    joining = None if ddp is None else ddp._join_config
    if joining and joining.enable and not joining.throw_on_early_termination:
        if communicator.size == 1:
            return
        raise RuntimeError(
            "layers that share statistics cannot be trained inside DistributedDataParallel.join: "
            f"it does not know of their communication, over {communicator.size} ranks. Use "
            "multibn.torch_backend.join, or join(throw_on_early_termination=True), which ends "
            "with the first rank that runs out of data."
        )


def _refuse(
    error: Exception, x: Any, num_channels: int | None, communicator: Communicator
) -> NoReturn:
    """Raise `error` once the other ranks know; they cannot if the channels are not known here."""
    if num_channels is None and isinstance(x, Tensor) and x.ndim > 1:
        num_channels = x.shape[1]
    if num_channels:
        on = x.device if isinstance(x, Tensor) and not x.is_meta else None
        statistics.refuse(communicator, num_channels, like=torch.empty(0, device=on))
    raise error


def _check_residual(residual: Any, x: Tensor, communicator: Communicator) -> None:
    """Raise unless `residual` is like `x`; collective then, as `check_input`."""
    if not isinstance(residual, Tensor):
        error: Exception = TypeError(
            f"`residual` must be a torch.Tensor: got {type(residual).__qualname__}."
        )
    elif residual.shape != x.shape or residual.dtype != x.dtype:
        error = ValueError(
            f"`residual` must have the shape and dtype of the input, {tuple(x.shape)} and "
            f"{x.dtype}: got {tuple(residual.shape)} and {residual.dtype}."
        )
    else:
        return
    _refuse(error, x, x.shape[1], communicator)


def _input_error(x: Any, num_channels: int | None) -> Exception | None:
    if not isinstance(x, Tensor):
        return TypeError(f"the input must be a torch.Tensor: got {type(x).__qualname__}.")
    if x.layout != torch.strided or x.is_meta:
        return TypeError(
            f"the input must be a dense tensor with data: got layout {x.layout} on {x.device}. "
            "Call to_dense() on a sparse tensor."
        )
    shape = tuple(x.shape)
    if x.ndim < 2:
        return ValueError(
            f"the input must have 2 or more dimensions, (N, C, *spatial): got shape {shape}."
        )
    if x.shape[1] == 0:
        return ValueError(f"the input must have channels: got 0 in shape {shape}.")
    if num_channels is not None and x.shape[1] != num_channels:
        return ValueError(
            f"the input must have {num_channels} channels in dimension 1, as many as the layer's "
            "`num_features` or the length of `weight` and `bias`: "
            f"got {x.shape[1]} in shape {shape}."
        )
    if not x.dtype.is_floating_point:
        return statistics.not_floating(x)
    return None


class _Normalize(torch.autograd.Function):
    """The autograd node: the statistics are an input, their gradient is inside."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        batch: BatchStatistics,
        communicator: Communicator,
        eps: float,
        weighting: Weighting,
        axis: tuple[int, ...] | None,
        relu: bool,
    ) -> Tensor:
        with _without_autocast(x):
            return statistics.normalize(
                x,
                batch,
                weight=weight,
                bias=bias,
                eps=eps,
                axis=axis,
                residual=residual,
                relu=relu,
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, _, batch, ctx.communicator, ctx.eps, ctx.weighting, ctx.axis, relu = inputs
        ctx.save_for_backward(x, weight, bias, output if relu else None, *batch)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight, bias, rectified, *saved = ctx.saved_tensors
        if rectified is not None:
            dy = torch.where(rectified.detach() > 0, dy, 0.0)
        with _without_autocast(x):
            needs_dx, needs_dweight, needs_dbias, needs_dresidual, *_ = ctx.needs_input_grad
            dresidual = dy if needs_dresidual else None
            if torch.is_grad_enabled():  # create_graph
                gradients = _differentiable_backward(ctx, dy, x, weight, bias)
                return (*gradients, dresidual, *[None] * 6)
            dx, local = backward(
                dy,
                x,
                weight,
                BatchStatistics(*saved),
                ctx.communicator,
                eps=ctx.eps,
                needs_dx=needs_dx,
                axis=ctx.axis,
            )
            dweight = local.sum_dy_xhat.to(weight) if needs_dweight else None
            dbias = local.sum_dy.to(bias) if needs_dbias else None
            return (dx, dweight, dbias, dresidual, *[None] * 6)


# torch binds arguments by the signature, which Python would otherwise make anew at each call.
_Normalize.forward.__signature__ = inspect.signature(_Normalize.forward)  # type: ignore[attr-defined]


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _differentiable_backward(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> list[Tensor | None]:
    """Gradients as differentiable functions of `dy`, `x` and `weight`.

    The forward pass is run again out of differentiable operations, its collective included, and
    autograd differentiates that.
    """
    # Other tensors than those of the outer graph: a parameter that also `x` depends on (a layer
    # used twice) would otherwise be differentiated through `x`, which the outer graph does already.
    x = x.view_as(x)
    weight, bias = (None if t is None else t.view_as(t) for t in (weight, bias))
    communicator = _Differentiable(during(ctx.communicator, "second order", x.dtype))
    batch = statistics.batch_statistics(x, communicator, weighting=ctx.weighting, axis=ctx.axis)
    y = statistics.normalize(x, batch, weight=weight, bias=bias, eps=ctx.eps, axis=ctx.axis)
    inputs = [
        t
        for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False)
        if t is not None and needed
    ]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


class _Differentiable:
    """A communicator whose allreduce autograd can differentiate, any number of times."""

    def __init__(self, communicator: Communicator) -> None:
        self.wrapped = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def allreduce(self, x: Tensor, /) -> Tensor:
        summed: Tensor = _AllReduce.apply(x, self.wrapped)
        return summed

    def split(self, color: int, key: int = 0) -> Communicator:
        return _Differentiable(self.wrapped.split(color, key))


class _AllReduce(torch.autograd.Function):
    """A sum over ranks; the gradient of the sum of all ranks' losses is again one."""

    @staticmethod
    def forward(x: Tensor, communicator: Communicator) -> Tensor:
        return communicator.allreduce(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.communicator = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad_outputs[0], ctx.communicator), None
