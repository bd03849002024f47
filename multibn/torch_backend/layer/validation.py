"""Checks of a layer's input, whose failure raises on all ranks."""

import math
from typing import Any, NoReturn

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
    x: Any, mask: Any, lengths: Any, num_channels: int | None, communicator: Communicator
) -> Tensor | None:
    """The engine's mask for `x`, see `masks.as_mask`. Collective if it raises."""
    if mask is None and lengths is None:
        return None
    if torch.compiler.is_compiling():
        name = communicator.operator_name  # type: ignore[attr-defined]
        found: Tensor = torch.ops.multibn.mask(x, mask, lengths, num_channels, name)
        return found
    try:
        check_input(x, None)
        for name, v in (("`mask`", mask), ("`lengths`", lengths)):
            check_no_tensor_subclass(name, v)
            check_dense(name, v)
        return masks.as_mask(x, mask, lengths, axis=non_channel_axes(x))
    except (TypeError, ValueError) as error:
        raise_on_all_ranks(error, x, num_channels, communicator)


def validate_call(args: NormArgs, num_channels: int | None, communicator: Communicator) -> None:
    """Raise unless a layer can normalize this input, here and now. Collective if it raises."""
    data_parallel.patch_active()
    ddp = active_ddp()
    # Inside its join, a rank without data runs the collectives of DistributedDataParallel only,
    # which the other ranks would take for a layer's.
    joins = ddp is not None and ddp._join_config.enable
    if joins and not ddp._join_config.throw_on_early_termination and communicator.size > 1:
        raise RuntimeError(
            "layers that share statistics cannot be trained inside DistributedDataParallel.join: "
            f"that join does not know of their communication over {communicator.size} ranks. Use "
            "multibn.torch.join, or join(throw_on_early_termination=True), which ends "
            "with the first rank that runs out of data."
        )
    if get_tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace, which some exporters and counters of operations call, cannot trace "
            "layers that compute statistics of a batch. Call model.eval() first, or trace a copy "
            "of the model after revert_sync_batchnorm."
        )
    try:
        if isinstance(communicator, LayerCommunicator):
            communicator.check_options()
        check_no_tensor_subclass("the input", args.x)
        check_no_tensor_subclass("`residual`", args.residual)
        check_input(args.x, num_channels)
        if args.x.is_meta and communicator.size > 1:
            raise TypeError("the input must have data: got meta. Use a layer for shapes.")
        check_options(args)
        if not autograd.is_transformed():  # these have no kernels, and may be compiled
            kernels.select(args.x.detach())  # may warn, which may be an error of this rank alone
    except (TypeError, ValueError, Warning) as error:
        if isinstance(args.x, Tensor) and len(args.axis) < args.x.ndim - 1:  # splits
            num_channels = math.prod(channels(args.x.shape, args.axis))
        raise_on_all_ranks(error, args.x, num_channels, communicator)


def non_channel_axes(x: Any, /) -> tuple[int, ...]:
    """The axes of an input `(N, C, *spatial)` that a layer reduces; `x` need not be a tensor."""
    return 0, *range(2, getattr(x, "ndim", 2))


def check_input(x: Any, num_channels: int | None, /) -> None:
    """Raise unless `x` is a floating-point tensor of shape `(N, num_channels, *spatial)`.

    `num_channels=None` accepts any number but 0. Not collective: see `raise_on_all_ranks`.
    """
    if not isinstance(x, Tensor):
        cure = ""
        if isinstance(x, PackedSequence):
            cure = (
                " Pad it: x, lengths = torch.nn.utils.rnn.pad_packed_sequence(x, "
                "batch_first=True), then layer(x.mT, lengths=lengths).mT."
            )
        raise TypeError(f"the input must be a torch.Tensor: got {type(x).__qualname__}.{cure}")
    check_dense("the input", x)
    shape = x.shape
    if torch.jit.is_tracing():  # sizes are tensors there, and a look at them is a warning
        return
    if len(shape) < 2:
        raise ValueError(
            f"the input must have 2 or more dimensions, (N, C, *spatial): got shape {tuple(shape)}."
        )
    if shape[1] == 0:
        raise ValueError(f"the input must have channels: got 0 in shape {tuple(shape)}.")
    if num_channels is not None and shape[1] != num_channels:
        cure = " Channels last: pass x.movedim(-1, 1)." if shape[-1] == num_channels else ""
        raise ValueError(
            f"the input must have {num_channels} channels in dimension 1, as many as the layer's "
            "`num_features` or the length of `weight` and `bias`: "
            f"got {shape[1]} in shape {tuple(shape)}.{cure}"
        )
    if not x.dtype.is_floating_point:
        raise statistics.not_floating(x)


def check_dense(name: str, x: Any, /) -> None:
    """Raise if `x` is a tensor without a shape or without an element in memory for each place."""
    if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
        kind, call = f"layout {x.layout}", "to_dense()"
        if x.is_nested:
            kind, call = f"a nested one of {kind}", "values() or torch.nested.to_padded_tensor"
        raise TypeError(f"{name} must be a dense tensor: got {kind}. Call {call} on it.")


def check_no_tensor_subclass(name: str, x: Any, /) -> None:
    """Raise if the class of `x` has operations of its own: the numbers of a step are elsewhere."""
    kind = type(x)
    if not isinstance(x, Tensor) or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return
    # Operations of torch.distributed's give plain results, and fake tensors have no numbers.
    if not (kind.__module__.startswith("torch.distributed.") or isinstance(x, FakeTensor)):
        raise TypeError(
            f"{name} must be a plain tensor: got a {kind.__qualname__}, whose class has a "
            "`__torch_dispatch__`. Pass the tensor that it wraps, and say by `mask` of the layer "
            "which elements do not count."
        )


def check_options(args: NormArgs) -> None:
    """Raise unless the parameters, `eps` and the residual fit the input, which was checked."""
    x, eps, axis, residual, running = args.x, args.eps, args.axis, args.residual, args.running
    if not (isinstance(eps, float) and 0 < eps < math.inf):
        check_eps(eps)
    shape = x.shape[1:2]
    if 1 in axis or len(axis) != x.ndim - 1:
        shape = channels(x.shape, axis)
    for name, p in (("weight", args.weight), ("bias", args.bias)):
        if p is not None and (p.shape != shape or not p.is_floating_point()):
            raise ValueError(
                f"`{name}` must have shape {tuple(shape)}, a number for each channel of the input, "
                f"in floating point: got {tuple(p.shape)} in {p.dtype}."
            )
    parts = [("weight", args.weight), ("bias", args.bias), ("residual", residual)]
    if type(running) is Running:
        size, sizes = math.prod(shape), (running.mean.numel(), running.var.numel())
        if sizes != (size, size):
            raise ValueError(
                f"`running_mean` and `running_var` must have {size} numbers each, one for each "
                f"channel of the input: got {sizes[0]} and {sizes[1]}."
            )
        parts += [("running_mean", running.mean), ("running_var", running.var)]
        for name, p in parts[-2:]:
            if p is not None and not p.is_floating_point():
                raise ValueError(f"`{name}` must be in floating point: got {p.dtype}.")
    if residual is not None:
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
    """Raise `error`, and let the other ranks raise too. Collective."""
    is_tensor = isinstance(x, Tensor)
    if not num_channels and is_tensor and not x.is_nested and x.ndim > 1:
        num_channels = x.shape[1]
    where = x.device if is_tensor and not x.is_meta else "cpu"
    like = torch.empty(0, dtype=torch.float32, device=where)
    layer_communicator.reject_input(communicator, error, num_channels, like)
    raise error
