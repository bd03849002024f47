"""The passes for torch tensors on a GPU, as Triton kernels: one or two launches each.

The kernels take activations that have sizes (N, C, S), see `_layout`: contiguous and channels-last
formats of any number of dimensions. They take per-channel tensors as `cuda_steps` does. Everything
else goes to `generic`. Nothing waits for the GPU, and the launches depend on shapes, strides and
dtypes only: a CUDA graph can capture a pass that has been compiled by an earlier run outside of it.
While the graph is replayed, no Python looks at the messages between the ranks. NaN or infinity on a
rank then shows in the running statistics of all ranks; ranks in different layers go unnoticed.
Results do not depend on the order in which programs run.
"""

import sys
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from multibn import message
from multibn.kernels import _triton, generic
from multibn.kernels._layout import sizes_in_memory
from multibn.kernels.cuda_steps import bits, fit, number, unpack, wide
from multibn.kernels.cuda_steps import move as move
from multibn.kernels.generic import Finished

_ARITHMETIC = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), tl.float32)
_ARITHMETIC[torch.float64] = tl.float64
_TILE = 2048  # elements: 16 for each thread of Triton's 4 warps
_PROGRAMS = 1024  # enough to fill any GPU, and few enough for small arrays of partial sums
_MAX_TILES = 64  # per program; bounds the rounding error, see `_triton.moments`
_MERGED = 1024  # partial sums that a program reads at a time


def local_moments(x: Tensor, /, *, axis: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """As `generic.local_moments`; two launches."""
    plan = _plan(x, axis)
    if plan is None:
        return generic.local_moments(x, axis=axis)
    mean, var = wide(x, plan.shape), wide(x, plan.shape)
    _merge(_triton.merge_moments, plan, _split_moments(x, plan), mean, var)
    return mean, var


def begin_forward(
    x: Tensor, weight: float, count: float, /, *, axis: tuple[int, ...], **options: Any
) -> Tensor:
    """As `generic.begin_forward`; two launches."""
    plan = _plan(x, axis)
    if plan is None or any(v is not None for v in options.values()):
        return generic.begin_forward(x, weight, count, axis=axis, **options)
    packed = wide(x, (message.forward_payload(plan.channels),))
    partials = _split_moments(x, plan)
    _merge(_triton.merge_and_pack_moments, plan, partials, packed, bits(weight), bits(count))
    return packed


def finish_forward(summed: Tensor, x: Tensor, /, *arguments: Any, **options: Any) -> Finished:
    """As `generic.finish_forward`; three launches, five if the momentum is cumulative."""
    weight, bias, *share = arguments
    running, mask = options.pop("running", None), options.get("mask")
    if mask is not None:
        return generic.finish_forward(summed, x, *arguments, running=running, **options)
    options.pop("mask", None)
    shape = tuple(n for i, n in enumerate(x.shape) if i not in options["axis"])
    mean, var, count, element_weight, state = unpack(summed, shape, *share)
    y = normalize(x, mean, var, weight, bias, **options)
    if running is not None and state == generic.RIGHT:
        move(running, mean, var, count, share[1])
    return y, mean, var, count, element_weight, state


begin_backward = partial(generic.begin_backward, passes=sys.modules[__name__])
finish_backward = partial(generic.finish_backward, passes=sys.modules[__name__])


def normalize(
    x: Tensor,
    /,
    *statistics: Any,
    eps: float,
    axis: tuple[int, ...],
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """As `generic.normalize`; one launch. The output is rounded once, to the dtype of `x`."""
    mean, var, weight, bias = statistics
    plan = _plan(x, axis, mean, var, parameters=(weight, bias))
    if plan is None or (residual is not None and residual.dtype != x.dtype):
        on: dict[str, Any] = {"residual": residual, "relu": relu}
        return generic.normalize(x, *statistics, eps=eps, axis=axis, **on)
    y = torch.empty_like(x)
    residual = None if residual is None else _laid_out_as(x, residual)
    arguments = x, *statistics, residual, y, bits(eps), *plan.sizes
    _launch(_triton.normalize, plan.programs, *arguments, like=x, RELU=relu, **plan.constants)
    return y


def backward_sums(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """As `generic.backward_sums`; two launches."""
    plan = _plan(x, axis, mean, var)
    if plan is None:
        return generic.backward_sums(dy, x, mean, var, eps=eps, axis=axis)
    partials = wide(x, (2, plan.channels, plan.splits))
    arguments = _laid_out_as(x, dy), x, mean, partials, *plan.sizes, plan.splits
    _launch(_triton.backward_sums, plan.programs, *arguments, like=x, **plan.constants)
    sum_dy, sum_dy_xhat = wide(x, mean.shape), wide(x, mean.shape)
    _merge(_triton.merge_sums, plan, partials, var, sum_dy, sum_dy_xhat, bits(eps))
    return sum_dy, sum_dy_xhat


def input_gradient(
    dy: Tensor, x: Tensor, /, *statistics: Any, eps: float, axis: tuple[int, ...]
) -> Tensor:
    """As `generic.input_gradient`; one launch."""
    mean, var, weight, element_weight, sum_dy, sum_dy_xhat = statistics
    plan = _plan(x, axis, mean, var, sum_dy, sum_dy_xhat, parameters=(weight,))
    factor = number(element_weight, x)
    if plan is None or factor is None:
        return generic.input_gradient(dy, x, *statistics, eps=eps, axis=axis)
    dx = torch.empty_like(x)
    inputs = _laid_out_as(x, dy), x, mean, var, weight, factor, sum_dy, sum_dy_xhat
    arguments = *inputs, dx, bits(eps), *plan.sizes
    _launch(_triton.input_gradient, plan.programs, *arguments, like=x, **plan.constants)
    return dx


class _Plan(NamedTuple):
    """How a pass over an activation is divided among programs, see `_triton`."""

    outer: int
    channels: int
    inner: int
    blocks: int
    tiles_per_program: int
    splits: int
    constants: dict[str, Any]
    shape: tuple[int, ...]  # of a per-channel tensor

    @property
    def programs(self) -> int:
        return self.blocks * self.splits

    @property
    def sizes(self) -> tuple[int, ...]:
        return self[:5]


def _split_moments(x: Tensor, plan: _Plan) -> Tensor:
    """The splits' moments, which `merge_moments` merges; one launch."""
    partials = wide(x, (3, plan.channels, plan.splits))
    arguments = x, partials, *plan.sizes, plan.splits
    _launch(_triton.moments, plan.programs, *arguments, like=x, **plan.constants)
    return partials


def _merge(kernel: Any, plan: _Plan, partials: Tensor, *arguments: Tensor | int) -> None:
    block = min(triton.next_power_of_2(plan.splits), _MERGED)
    arguments = partials, *arguments, plan.channels, plan.splits
    # Without fused operations products and sums are rounded one by one, as in `generic`.
    options = {"BLOCK": block, "enable_fp_fusion": False}
    _launch(kernel, plan.channels, *arguments, like=partials, **options)


def _launch(kernel: Any, programs: int, *arguments: Any, like: Tensor, **constants: Any) -> None:
    with torch.cuda.device_of(like):
        kernel[programs,](*arguments, **constants)


def _plan(
    x: Tensor,
    axis: tuple[int, ...],
    *per_channel: Tensor,
    parameters: tuple[Tensor | None, ...] = (),
) -> _Plan | None:
    """The plan for `x`; None if the kernels cannot take `x` or the per-channel tensors."""
    plan = _plan_of(x.shape, x.stride(), x.dtype, axis)
    if plan is None or not per_channel:
        return plan
    if per_channel[0].device != x.device or per_channel[0].shape != plan.shape:
        return None
    return plan if fit(*per_channel, parameters=parameters) else None


@lru_cache(maxsize=1024)
def _plan_of(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, axis: tuple[int, ...]
) -> _Plan | None:
    sizes = sizes_in_memory(shape, strides, axis)
    if sizes is None or 0 in shape or dtype not in _ARITHMETIC:
        return None
    outer, channels, inner = sizes
    last = inner == 1 and channels > 1
    width = channels if last else inner
    cols = min(triton.next_power_of_2(width), 64 if last else 512)
    rows = min(triton.next_power_of_2(outer), _TILE // cols)
    blocks = triton.cdiv(channels, cols) if last else channels
    tiles = triton.cdiv(outer, rows) * (1 if last else triton.cdiv(inner, cols))
    per_program = min(max(tiles * blocks // _PROGRAMS, 1), tiles, _MAX_TILES)
    return _Plan(
        outer,
        channels,
        inner,
        blocks,
        per_program,
        triton.cdiv(tiles, per_program),
        {
            "ROWS": rows,
            "COLS": cols,
            "CHANNELS_LAST": last,
            "DTYPE": _ARITHMETIC[dtype],
            "enable_fp_fusion": True,  # the default, but Triton 3.9 warns without it
        },
        tuple(n for i, n in enumerate(shape) if i not in axis),
    )


def _laid_out_as(x: Tensor, dy: Tensor) -> Tensor:
    """`dy` in the memory order of `x`; a copy if need be, of an expanded gradient for example."""
    same = all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), dy.stride(), strict=True))
    return dy if same else torch.empty_like(x, dtype=dy.dtype).copy_(dy)
