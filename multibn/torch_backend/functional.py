"""Synchronized batch normalization as a differentiable function of tensors."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multibn import statistics
from multibn._typing import Weighting
from multibn.communicators import Communicator, as_communicator
from multibn.communicators.conversation import Conversation
from multibn.statistics import BatchStatistics
from multibn.torch_backend import _autograd
from multibn.torch_backend._autograd import Input


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
        On the other ranks, if one rank's input was refused; on all, if they are in different
        layers, or in different phases of one.
    FloatingPointError
        On all ranks, if the statistics of one are not finite (on a GPU one call later).

    Notes
    -----
    Differentiating twice (`create_graph=True`) is exact over ranks; it repeats the forward's
    collective in the backward pass. `x` must need a gradient on all ranks or on none: ranks where
    it does wait for the others in the backward pass.
    """
    communicator = Conversation(as_communicator(process_group), lambda: "sync_batch_norm")
    shapes = [tuple(p.shape) for p in (weight, bias) if p is not None]
    if len(set(shapes)) > 1 or any(len(shape) != 1 for shape in shapes):
        error = ValueError(f"`weight` and `bias` must have the same shape (C,): got {shapes}.")
        refuse(error, [x], [None], communicator)
    num_channels = shapes[0][0] if shapes else None
    inputs = [Input(x, weight, bias, eps)]
    return forward_all(inputs, [num_channels], communicator, weighting=weighting)[0]


def forward_all(
    inputs: Sequence[Input],
    num_channels: Sequence[int | None],
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
) -> list[tuple[Tensor, BatchStatistics]]:
    """Check several inputs and normalize them, with one message each way. Collective.

    `num_channels` are the channels that they must have, see `check_input`.
    """
    _refuse_ddp_join(communicator)
    checked = []
    for i, n in zip(inputs, num_channels, strict=True):
        error = _input_error(i.x, n)
        if error is None and i.residual is not None:
            error = _residual_error(i.residual, i.x)
        if error is not None:
            xs = [i.x for i in inputs]
            refuse(error, xs, num_channels, communicator)
        axis = statistics.reduced_axes(i.x.ndim) if i.axis is None else i.axis
        checked.append(i._replace(axis=axis))
    batches = _autograd.batch_statistics(checked, communicator, weighting)
    ys = _autograd.normalize(checked, batches, communicator, weighting)
    return list(zip(ys, batches, strict=True))


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


def check_input(x: Any, num_channels: int | None, /) -> None:
    """Raise unless `x` is a floating-point tensor of shape `(N, num_channels, *spatial)`.

    `num_channels=None` takes any number but 0. Not collective: see `refuse`.
    """
    error = _input_error(x, num_channels)
    if error is not None:
        raise error


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


def refuse(
    error: Exception,
    xs: Sequence[Any],
    num_channels: Sequence[int | None],
    communicator: Communicator,
) -> NoReturn:
    """Raise `error` once the other ranks know; they cannot if the channels are not known here."""
    known = [
        n or (x.shape[1] if isinstance(x, Tensor) and x.ndim > 1 else 0)
        for x, n in zip(xs, num_channels, strict=True)
    ]
    if all(known):
        on = next((x.device for x in xs if isinstance(x, Tensor) and not x.is_meta), None)
        statistics.refuse(communicator, *known, like=torch.empty(0, device=on))
    raise error


def _residual_error(residual: Any, x: Tensor) -> Exception | None:
    if not isinstance(residual, Tensor):
        return TypeError(f"`residual` must be a torch.Tensor: got {type(residual).__qualname__}.")
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return ValueError(
            f"`residual` must have the shape and dtype of the input, {tuple(x.shape)} and "
            f"{x.dtype}: got {tuple(residual.shape)} and {residual.dtype}."
        )
    return None


def _input_error(x: Any, num_channels: int | None) -> Exception | None:
    if not isinstance(x, Tensor):
        return TypeError(f"the input must be a torch.Tensor: got {type(x).__qualname__}.")
    if x.layout != torch.strided or x.is_meta:
        return TypeError(
            f"the input must be a dense tensor with data: got layout {x.layout} on {x.device}. "
            "Call to_dense() on a sparse tensor."
        )
    shape = tuple(x.shape)
    if len(shape) < 2:
        return ValueError(
            f"the input must have 2 or more dimensions, (N, C, *spatial): got shape {shape}."
        )
    if shape[1] == 0:
        return ValueError(f"the input must have channels: got 0 in shape {shape}.")
    if num_channels is not None and shape[1] != num_channels:
        return ValueError(
            f"the input must have {num_channels} channels in dimension 1, as many as the layer's "
            "`num_features` or the length of `weight` and `bias`: "
            f"got {shape[1]} in shape {shape}."
        )
    if not x.dtype.is_floating_point:
        return statistics.not_floating(x)
    return None
