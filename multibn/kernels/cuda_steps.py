"""The steps between the passes for torch tensors on a GPU, as Triton kernels: one launch each.

One by one their operations are dozens of launches, which take longer than the passes over a small
activation. For dense tensors of one shape on one device, wide ones and parameters and running
statistics of any floating-point dtype; everything else goes to `generic`. Nothing waits for the
GPU, and all of them can be captured in a CUDA graph as the passes of `cuda` can.
"""

import struct
import sys
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from multibn import message
from multibn.kernels import _triton_steps, generic
from multibn.kernels.generic import Unpacked

_BLOCK = 256  # channels of a program
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def pack(mean: Tensor, meansqr: Tensor, weight: float, count: float, /) -> Tensor:
    """As `generic.pack`."""
    if not fit(mean, meansqr):
        packed: Tensor = generic.pack(mean, meansqr, weight, count)
        return packed
    packed = wide(mean, (message.forward_payload(mean.numel()),))
    _launch(_triton_steps.pack, mean, meansqr, packed, bits(weight), bits(count), like=mean)
    return packed


def unpack(summed: Tensor, shape: tuple[int, ...], weight: float, count: float, /) -> Unpacked:
    """As `generic.unpack`."""
    if not fit(summed) or not prod(shape):
        return generic.unpack(summed, shape, weight, count)
    mean, var = wide(summed, shape), wide(summed, shape)
    total_count, element_weight = wide(summed, ()), wide(summed, ())
    _launch(
        _triton_steps.unpack,
        summed,
        mean,
        var,
        total_count,
        element_weight,
        bits(weight),
        bits(max(count, 1.0)),
        like=mean,
    )
    return Unpacked(mean, var, total_count, element_weight, refused=False, finite=True)


def move_averages(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float | Tensor,
    factor: float | Tensor,
    /,
) -> tuple[Tensor, Tensor]:
    """As `generic.move_averages`."""
    numbers = number(momentum, mean), number(factor, mean)
    parameters = running_mean, running_var
    if not fit(mean, var, parameters=parameters) or any(v is None for v in numbers):
        return generic.move_averages(running_mean, running_var, mean, var, momentum, factor)
    moved_mean, moved_var = torch.empty_like(running_mean), torch.empty_like(running_var)
    _launch(
        _triton_steps.move_averages,
        running_mean,
        running_var,
        mean,
        var,
        moved_mean,
        moved_var,
        *numbers,
        like=mean,
    )
    return moved_mean, moved_var


def fit(first: Tensor, *others: Tensor, parameters: tuple[Tensor | None, ...] = ()) -> bool:
    """Whether the kernels can take these: wide ones, and `parameters` that may not be wide."""
    given = [v for v in parameters if v is not None]
    return (
        first.numel() > 0
        and all(v.dtype == torch.float64 for v in (first, *others))
        and all(v.dtype in _FLOATING for v in given)
        and all(
            type(v) in (Tensor, torch.nn.Parameter)
            and v.is_contiguous()
            and v.shape == first.shape
            and v.device == first.device
            for v in (first, *others, *given)
        )
    )


def number(v: float | Tensor, like: Tensor) -> int | Tensor | None:
    """What a kernel is given for `v`; None if it cannot be, without waiting for another device."""
    if not isinstance(v, Tensor):
        return bits(v)
    fits = type(v) is Tensor and v.ndim == 0 and v.dtype == torch.float64
    return v if fits and v.device == like.device else None


def bits(v: float) -> int:
    """Those of `v` in float64, exact where Triton's float32 is not."""
    return int.from_bytes(struct.pack("=d", v), sys.byteorder, signed=True)


def wide(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for float64 results beside `like`."""
    return torch.empty(shape, dtype=torch.float64, device=like.device)


def _launch(kernel: Any, *arguments: Tensor | int | None, like: Tensor) -> None:
    C = like.numel()
    with torch.cuda.device_of(like):
        # Products and sums are rounded one by one, as `generic` does.
        kernel[triton.cdiv(C, _BLOCK),](*arguments, C, BLOCK=_BLOCK, enable_fp_fusion=False)
