"""The passes over an activation, made of operations that torch.compile turns into good loops.

As the passes of `kernels.generic_passes`, but for two things. The sums are float64 and taken in one
pass; compiled code makes no array of the float64 elements. And every coefficient per channel is an
array in memory: inductor would otherwise put the float64 arithmetic of the coefficients into the
loop over the elements.
"""

import torch
from torch import Tensor

from multibn import statistics
from multibn.kernels import generic, generic_passes


def local_moments(x: Tensor, /, *, axis: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance in one pass, about the element in the middle of each channel.

    An element 1,000 standard deviations away costs 6 of the 16 digits.
    """
    count = generic.num_elements(x, axis)
    if count == 0:
        zeros = x.new_zeros(statistics.channels(x, axis), dtype=torch.float64)
        return zeros, zeros
    middle = x
    for i in sorted(axis, reverse=True):
        middle = middle.select(i, x.shape[i] // 2)
    d = _arithmetic(x).double() - _per_channel(middle.double(), x, axis)
    first, second = _sum(d, x, axis) / count, _sum(d * d, x, axis) / count
    return middle + first, second - first * first


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """As `generic_passes.normalize`."""
    wide = _arithmetic(x)
    centre, scale, shift = (
        _in_memory(v, x, axis)
        for v in generic_passes.coefficients(mean, var, weight, bias, eps=eps, dtype=wide.dtype)
    )
    y = ((wide - centre) * scale + shift).to(x.dtype)
    y = y if residual is None else y + residual
    return y.relu() if relu else y  # keeps NaN, and is vectorized


def backward_sums(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, /, *, eps: float, axis: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """As `generic_passes.backward_sums`."""
    wide, dy = _arithmetic(x), _arithmetic(dy)
    centre = _in_memory(mean.to(wide.dtype), x, axis)
    sum_dy, sum_dy_d = _sum(dy, x, axis), _sum(dy * (wide - centre), x, axis)
    remainder = mean - centre.reshape(mean.shape)
    return sum_dy, (sum_dy_d - remainder * sum_dy) / (var + eps).sqrt()


def input_gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    element_weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xhat: Tensor,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
) -> Tensor:
    """As `generic_passes.input_gradient`."""
    wide = _arithmetic(x)
    centre, x_scale, dy_scale, shift = (
        _in_memory(v, x, axis)
        for v in generic_passes.gradient_coefficients(
            mean, var, weight, element_weight, sum_dy, sum_dy_xhat, eps=eps, dtype=wide.dtype
        )
    )
    return ((wide - centre) * x_scale + _arithmetic(dy) * dy_scale + shift).to(x.dtype)


def _arithmetic(x: Tensor) -> Tensor:
    return x.to(generic.arithmetic_dtype(torch, x.dtype))


def _sum(v: Tensor, x: Tensor, axis: tuple[int, ...]) -> Tensor:
    """The wide sum of `v`, whose elements are computed from those of `x`.

    Inductor's loop for channels_last takes 16 channels through the whole array, then the next 16. A
    row at a time is read faster: 0.6 in place of 2.2 ms for the moments of 6 MB.
    """
    channels = [i for i in range(x.ndim) if i not in axis]
    if len(axis) > 1 and x.stride(channels[-1]) == 1:
        return v.sum(max(axis), keepdim=True).double().sum(axis)
    return v.sum(axis).double()


def _in_memory(v: Tensor, x: Tensor, axis: tuple[int, ...]) -> Tensor:
    """`v` in the arithmetic dtype, which inductor computes before the loop over `x`.

    A view of other strides needs an array, even where the strides are the same.
    """
    v = v.to(generic.arithmetic_dtype(torch, x.dtype))
    return _per_channel(v.as_strided(v.shape, v.stride()), x, axis)


def _per_channel(v: Tensor, x: Tensor, axis: tuple[int, ...]) -> Tensor:
    return v.reshape([1 if i in axis else n for i, n in enumerate(x.shape)])
