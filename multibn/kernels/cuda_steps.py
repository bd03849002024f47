"""The steps between the passes for torch tensors on a GPU, as Triton kernels: one launch each.

One by one their operations are dozens of launches, which take longer than the passes over a small
activation. For dense tensors of one shape on one device, wide ones and parameters and running
statistics of any floating-point dtype; everything else goes to `generic`. Nothing waits for the
GPU, and all of them can be captured in a CUDA graph as the passes of `cuda` can.
"""

import struct
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from multibn.kernels import _triton_steps, generic
from multibn.kernels.generic import Unpacked

_BLOCK = 256  # channels of a program
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def pack(mean: Tensor, meansqr: Tensor, weight: float, count: float, /) -> Tensor:
    """As `generic.pack`."""
    if not _fit(mean, meansqr):
        packed: Tensor = generic.pack(mean, meansqr, weight, count)
        return packed
    packed = _wide(mean, (2 * mean.numel() + 2,))
    _launch(_triton_steps.pack, mean, meansqr, packed, _bits(weight), _bits(count), like=mean)
    return packed


def unpack(summed: Tensor, shape: tuple[int, ...], weight: float, count: float, /) -> Unpacked:
    """As `generic.unpack`."""
    if not _fit(summed) or not prod(shape):
        return generic.unpack(summed, shape, weight, count)
    mean, var = _wide(summed, shape), _wide(summed, shape)
    of_all, element_weight = _wide(summed, ()), _wide(summed, ())
    _launch(
        _triton_steps.unpack,
        summed,
        mean,
        var,
        of_all,
        element_weight,
        _bits(weight),
        _bits(max(count, 1.0)),
        like=mean,
    )
    return Unpacked(mean, var, of_all, element_weight, refused=False, finite=True)


def affine(
    var: Tensor, weight: Tensor | None, bias: Tensor | None, /, *, eps: float
) -> tuple[Tensor, Tensor]:
    """As `generic.affine`."""
    if not _fit(var, parameters=(weight, bias)):
        return generic.affine(var, weight, bias, eps=eps)
    scale, shift = _wide(var, var.shape), _wide(var, var.shape)
    _launch(_triton_steps.affine, var, weight, bias, scale, shift, _bits(eps), like=var)
    return scale, shift


def over_std(v: Tensor, var: Tensor, /, *, eps: float) -> Tensor:
    """As `generic.over_std`."""
    if not _fit(var, v):
        quotient: Tensor = generic.over_std(v, var, eps=eps)
        return quotient
    quotient = _wide(var, var.shape)
    _launch(_triton_steps.over_std, v, var, quotient, _bits(eps), like=var)
    return quotient


def gradient_coefficients(
    var: Tensor,
    weight: Tensor | None,
    element_weight: Tensor | float,
    sum_dy: Tensor,
    sum_dy_xhat: Tensor,
    /,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `generic.gradient_coefficients`."""
    number = _number(element_weight, var)
    if number is None or not _fit(var, sum_dy, sum_dy_xhat, parameters=(weight,)):
        return generic.gradient_coefficients(
            var, weight, element_weight, sum_dy, sum_dy_xhat, eps=eps
        )
    dy_scale, x_scale, shift = (_wide(var, var.shape) for _ in range(3))
    _launch(
        _triton_steps.gradient_coefficients,
        var,
        weight,
        number,
        sum_dy,
        sum_dy_xhat,
        dy_scale,
        x_scale,
        shift,
        _bits(eps),
        like=var,
    )
    return dy_scale, x_scale, shift


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
    numbers = _number(momentum, mean), _number(factor, mean)
    fit = _fit(mean, var, parameters=(running_mean, running_var))
    if not fit or any(number is None for number in numbers):
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


def _fit(first: Tensor, *others: Tensor, parameters: tuple[Tensor | None, ...] = ()) -> bool:
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


def _number(v: float | Tensor, like: Tensor) -> int | Tensor | None:
    """What a kernel is given for `v`; None if it cannot be, without waiting for another device."""
    if not isinstance(v, Tensor):
        return _bits(v)
    fits = type(v) is Tensor and v.ndim == 0 and v.dtype == torch.float64
    return v if fits and v.device == like.device else None


def _bits(v: float) -> int:
    """Those of `v` in float64, exact where Triton's float32 is not."""
    (bits,) = struct.unpack("=q", struct.pack("=d", v))
    return int(bits)


def _wide(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=like.device)


def _launch(kernel: Any, *arguments: Tensor | int | None, like: Tensor) -> None:
    C = like.numel()
    with torch.cuda.device_of(like):
        # Products and sums are rounded one by one, as `generic` does.
        kernel[triton.cdiv(C, _BLOCK),](*arguments, C, BLOCK=_BLOCK, enable_fp_fusion=False)
