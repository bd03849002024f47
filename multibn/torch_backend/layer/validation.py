"""Checks of a layer's input. If one fails on a rank, all ranks raise."""

import math
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from multibn import kernels
from multibn._typing import check_eps, check_residual
from multibn.communicators import Communicator, layer_communicator
from multibn.communicators.layer_communicator import LayerCommunicator
from multibn.engine import masks, statistics
from multibn.engine.plan import NormArgs
from multibn.kernels import Running
from multibn.kernels.layout import channels
from multibn.torch_backend._torch_private import (
    FakeTensor,
    active_ddp,
    get_tracing_state,
    not_compiled,
)
from multibn.torch_backend.layer import autograd, data_parallel


def mask_of(
    x: Any, mask: Any, lengths: Any, num_channels: int | None, communicator: Any
) -> Tensor | None:
    """Return the engine's mask for `x`, see `masks.as_mask`. Collective if it raises."""
    if mask is None and lengths is None:
        return None
    if torch.compiler.is_compiling():
        name = communicator.operator_name
        return cast(Tensor, torch.ops.multibn.mask(x, mask, lengths, num_channels, name))
    try:
        check_input(x, None)
        for name, v in (("`mask`", mask), ("`lengths`", lengths)):
            check_no_tensor_subclass(name, v)
            check_dense(name, v)
        return masks.as_mask(x, mask, lengths, axis=non_channel_axes(x))
    except (TypeError, ValueError) as error:
        raise_on_all_ranks(error, x, num_channels, communicator)


def validate_call(args: NormArgs, num_channels: int | None, communicator: Communicator) -> None:
    """Raise if the layer cannot normalize this input in this context. Collective if it raises."""
    ddp = active_ddp()
    if ddp is not None and ddp not in data_parallel.patched:
        data_parallel.patch_ddp(ddp)
    # In DistributedDataParallel.join, a rank that is out of data runs DDP's collectives only. They
    # would be matched with the collectives of a layer on the other ranks.
    joins = ddp is not None and ddp._join_config.enable
    if joins and not ddp._join_config.throw_on_early_termination and communicator.size > 1:
        raise RuntimeError(
            "layers that share statistics cannot be trained inside DistributedDataParallel.join, "
            f"which does not support their collectives over {communicator.size} ranks. Use "
            "multibn.torch.join, or join(throw_on_early_termination=True), which ends "
            "when the first rank runs out of data."
        )
    if get_tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace, which some exporters and FLOP counters call, cannot trace layers "
            "that compute statistics of a batch. Call model.eval() first, or trace a copy of the "
            "model after revert_sync_batchnorm."
        )
    try:
        if isinstance(communicator, LayerCommunicator):
            communicator.check_options()
        check_no_tensor_subclass("the input", args.x)
        check_no_tensor_subclass("`residual`", args.residual)
        check_input(args.x, num_channels)
        if args.x.is_meta and communicator.size > 1:
            raise TypeError(
                "the input must have data: got a tensor on the meta device. To infer shapes, call "
                "a layer such as SyncBatchNorm."
            )
        check_options(args)
        if not autograd.is_transformed():  # torch.func uses no kernels
            kernels.select(args.x.detach())  # may warn; a filter may turn this into an error
    except (TypeError, ValueError, Warning) as error:
        if isinstance(args.x, Tensor) and len(args.axis) < args.x.ndim - 1:  # (splits, channels)
            num_channels = math.prod(channels(args.x.shape, args.axis))
        raise_on_all_ranks(error, args.x, num_channels, communicator)


def as_number(value: Any, /) -> Any:
    """Return the number in a tensor of shape (), as torch's layers take for `eps`; else `value`."""
    is_number = isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad
    return value.item() if is_number else value


def non_channel_axes(x: Any, /) -> tuple[int, ...]:
    """Return the axes of `(N, C, *spatial)` that a layer reduces; `x` need not be a tensor."""
    return 0, *range(2, getattr(x, "ndim", 2))


def check_input(x: Any, num_channels: int | None, /) -> None:
    """Raise unless `x` is a floating-point tensor of shape `(N, num_channels, *spatial)`.

    `num_channels=None` accepts any number but 0. Not collective: see `raise_on_all_ranks`.
    """
    if not isinstance(x, Tensor):
        advice = ""
        if isinstance(x, PackedSequence):
            advice = (
                " Pad it: x, lengths = torch.nn.utils.rnn.pad_packed_sequence(x, "
                "batch_first=True), then layer(x.mT, lengths=lengths).mT."
            )
        raise TypeError(f"the input must be a torch.Tensor: got {type(x).__qualname__}.{advice}")
    check_dense("the input", x)
    shape = x.shape
    if torch.jit.is_tracing():  # sizes are tensors, and comparing them would warn
        return
    if len(shape) < 2:
        raise ValueError(
            f"the input must have 2 or more dimensions, (N, C, *spatial): got shape {tuple(shape)}."
        )
    if shape[1] == 0:
        raise ValueError(f"the input must have channels: got 0 in shape {tuple(shape)}.")
    if num_channels is not None and shape[1] != num_channels:
        is_last = shape[-1] == num_channels
        advice = " If channels are the last dimension, pass x.movedim(-1, 1)." if is_last else ""
        raise ValueError(
            f"the input must have {num_channels} channels in dimension 1, as many as the layer's "
            "`num_features` or the length of `weight` and `bias`: "
            f"got {shape[1]} in shape {tuple(shape)}.{advice}"
        )
    if not x.dtype.is_floating_point:
        raise statistics.not_floating(x)


def check_dense(name: str, x: Any, /) -> None:
    """Raise if `x` is a nested or a sparse tensor."""
    if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
        kind, advice = f"layout {x.layout}", "Call to_dense() on it."
        if x.is_nested:
            kind = f"a nested tensor of {kind}"
            advice = "Call torch.nested.to_padded_tensor, and exclude the padding by `mask`."
        raise TypeError(f"{name} must be a dense tensor: got {kind}. {advice}")


def check_no_tensor_subclass(name: str, x: Any, /) -> None:
    """Raise if the class of `x` has its own `__torch_dispatch__`, as kernels would bypass it."""
    kind = type(x)
    if not isinstance(x, Tensor) or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return
    # torch.distributed's subclasses are allowed, as their operations return plain tensors.
    if not (kind.__module__.startswith("torch.distributed.") or isinstance(x, FakeTensor)):
        raise TypeError(
            f"{name} must be a plain tensor: got a {kind.__qualname__}, whose class has a "
            "`__torch_dispatch__`. Pass the wrapped tensor; if some of its elements do not count, "
            "call the layer with `mask`, True for the elements that count."
        )


def check_options(args: NormArgs) -> None:
    """Raise unless parameters, `eps`, buffers and residual fit the input, which is valid."""
    x, eps, axis, residual, running = args.x, args.eps, args.axis, args.residual, args.running
    if not (isinstance(eps, float) and 0 < eps < math.inf):
        check_eps(eps)
    shape = x.shape[1:2]
    if 1 in axis or len(axis) != x.ndim - 1:
        shape = channels(x.shape, axis)
    parts = [("weight", args.weight), ("bias", args.bias)]
    if type(running) is Running:
        parts += [("running_mean", running.mean), ("running_var", running.var)]
    for name, p in parts:
        if p is None:
            continue
        # The running statistics of splits have one axis.
        fits = p.shape == shape or ("running" in name and p.numel() == math.prod(shape))
        if not (fits and p.is_floating_point()):
            raise ValueError(
                f"`{name}` must have shape {tuple(shape)}, a number for each channel of the input, "
                f"and a floating-point dtype: got {tuple(p.shape)} and {p.dtype}."
            )
    if residual is not None:
        parts.append(("residual", residual))
        check_dense("`residual`", residual)
        check_residual(residual, x, Tensor, "a torch.Tensor")
    device = x.device
    for name, p in parts:
        if p is not None and p.device != device:
            raise ValueError(
                f"`{name}` must be on the device of the input, {device}: got {p.device}. Call "
                "`to` on the input or on the model."
            )


@not_compiled
def raise_on_all_ranks(
    error: Exception, x: Any, num_channels: int | None, communicator: Communicator
) -> NoReturn:
    """Raise `error`, and RuntimeError on the other ranks. Collective."""
    is_tensor = isinstance(x, Tensor)
    if not num_channels and is_tensor and not x.is_nested and x.ndim > 1:
        num_channels = x.shape[1]
    device = x.device if is_tensor and not x.is_meta else "cpu"
    like = torch.empty(0, dtype=torch.float32, device=device)
    layer_communicator.reject_input(communicator, error, num_channels, like)
    raise error
