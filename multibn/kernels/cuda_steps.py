"""The steps between the passes for torch tensors on a GPU, as Triton kernels: one launch each.

A step is dozens of operations on C numbers: one launch each would take longer than the passes over
a small activation. The kernels take dense tensors of one shape on one device: wide ones, and
parameters and running statistics of any floating-point dtype. Everything else goes to `generic`.
Nothing waits for the GPU, and a CUDA graph can capture the steps as it can the passes of `cuda`.
"""

import struct
import sys
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from multibn.kernels import _triton_steps, generic
from multibn.kernels.generic import Running

_BLOCK = 256  # channels of a program
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unpack(
    summed: Tensor, shape: tuple[int, ...], rank_weight: float, count: float, /
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """As `generic.unpack`."""
    if not fit(summed) or not prod(shape):
        return generic.unpack(summed, shape, rank_weight, count)
    mean, var = wide(summed, shape), wide(summed, shape)
    total, element_weight = wide(summed, ()), wide(summed, ())
    outputs = mean, var, total, element_weight
    numbers = bits(rank_weight), bits(max(count, 1.0))
    _launch(_triton_steps.unpack, summed, *outputs, *numbers, like=mean)
    return *outputs, generic.state(summed, count)


def move(running: Running, mean: Tensor, var: Tensor, count: Tensor, local_count: Any, /) -> None:
    """As `generic.move`; one launch, or three if the momentum is cumulative."""
    old_mean, old_var, momentum, convention, num_batches = running
    mean, var = mean.view(old_mean.shape), var.view(old_mean.shape)
    moved = [v for v in (old_mean, old_var, num_batches) if v is not None]
    if (
        not fit(mean, var, parameters=(old_mean, old_var))
        or not isinstance(number(count, mean), Tensor)
        or (convention == "unbiased_local" and isinstance(local_count, Tensor))
        or any(v.is_inference() for v in moved)
        or not (num_batches is None or _is_counter(num_batches, mean))
    ):
        generic.move(running, mean, var, count, local_count)
        return
    cumulative = momentum is None and num_batches is not None
    if cumulative:  # every program reads the counter, so that none of them may write
        assert num_batches is not None
        num_batches.add_(count > 0)
    is_global = convention == "unbiased_global"  # the kernel then computes the factor
    factor = 0.0 if is_global else generic.variance_factor(0.0, local_count, convention)
    numbers = bits(momentum or 0.0), bits(factor)
    batch = mean, var, count
    constants = {"CUMULATIVE": cumulative, "UNBIASED": is_global}
    arguments = old_mean, old_var, num_batches, *batch, *numbers
    _launch(_triton_steps.move, *arguments, like=mean, **constants)
    for v in moved:  # autograd would not notice otherwise that a saved tensor has changed
        torch.autograd.graph.increment_version(v)


def _is_counter(v: Tensor, like: Tensor) -> bool:
    return (
        type(v) is Tensor and v.shape == () and v.dtype == torch.int64 and (v.device == like.device)
    )


def fit(first: Tensor, *others: Tensor, parameters: tuple[Tensor | None, ...] = ()) -> bool:
    """Whether the kernels can take these wide tensors, and `parameters` of other dtypes."""
    present = [v for v in parameters if v is not None]
    return (
        first.numel() > 0
        and all(v.dtype == torch.float64 for v in (first, *others))
        and all(v.dtype in _FLOATING for v in present)
        and all(
            type(v) in (Tensor, torch.nn.Parameter)
            and v.is_contiguous()
            and v.shape == first.shape
            and v.device == first.device
            for v in (first, *others, *present)
        )
    )


def number(v: float | Tensor, like: Tensor) -> int | Tensor | None:
    """`v` as a kernel's argument; None if the kernel would have to wait for another device."""
    if not isinstance(v, Tensor):
        return bits(v)
    fits = type(v) is Tensor and v.ndim == 0 and v.dtype == torch.float64
    return v if fits and v.device == like.device else None


def bits(v: float) -> int:
    """The bits of `v` in float64: Triton would pass `v` itself in float32."""
    return int.from_bytes(struct.pack("=d", v), sys.byteorder, signed=True)


def wide(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised float64 tensor on the device of `like`."""
    return torch.empty(shape, dtype=torch.float64, device=like.device)


def _launch(kernel: Any, *arguments: Tensor | int | None, like: Tensor, **constants: bool) -> None:
    C = like.numel()
    # Without fused operations products and sums are rounded one by one, as in `generic`.
    options = {"BLOCK": _BLOCK, "enable_fp_fusion": False, **constants}
    with torch.cuda.device_of(like):
        kernel[triton.cdiv(C, _BLOCK),](*arguments, C, **options)
