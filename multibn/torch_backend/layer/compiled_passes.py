"""The passes over an activation, made of operations that torch.compile turns into good loops.

As the passes of `kernels.generic_passes`, but for two things. The sums are float64, and moments are
taken in one pass; compiled code makes no array of the float64 elements. And every coefficient per
channel is an array in memory: inductor would otherwise put the float64 arithmetic of the
coefficients into the loop over the elements.
"""

from typing import Any

import torch
from torch import Tensor

from multibn.kernels.generic_passes import Passes, arithmetic_dtype, num_elements
from multibn.kernels.layout import channels


class CompiledPasses(Passes):
    """The passes in another way."""

    def local_moments(
        self, x: Tensor, /, axis: tuple[int, ...], mask: Tensor | None = None, count: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance in one pass, about the element in the middle of each channel.

        An element 1,000 standard deviations away costs 6 of the 16 digits. With a mask, the element
        in the middle may be any number, so that there are two passes.
        """
        if mask is not None:
            return super().local_moments(x, axis, mask, count)
        n = num_elements(x, axis)
        if n == 0:
            zeros = x.new_zeros(channels(x.shape, axis), dtype=torch.float64)
            return zeros, zeros
        middle = x
        for i in sorted(axis, reverse=True):
            middle = middle.select(i, x.shape[i] // 2)
        centre = middle.double()
        d = x.to(arithmetic_dtype(torch, x.dtype)).double() - _broadcastable(centre, x, axis)
        first, second = self.sum(d, x, axis) / n, self.sum(d * d, x, axis) / n
        return centre + first, second - first * first

    def relu(self, y: Tensor, /) -> Tensor:
        """ReLU, which keeps NaN, and is vectorized."""
        return y.relu()

    def per_channel(
        self, v: Tensor, x: Tensor, axis: tuple[int, ...], dtype: torch.dtype, /
    ) -> Tensor:
        """`v` with a dtype, which inductor computes before the loop over `x`.

        A view of other strides needs an array, even where the strides are the same.
        """
        v = v.to(dtype)
        return _broadcastable(v.as_strided(v.shape, v.stride()), x, axis)

    def sum(self, v: Tensor, x: Tensor, axis: tuple[int, ...], /) -> Tensor:
        """The wide sum.

        Inductor's loop for channels_last takes 16 channels through the whole array, then the next
        16. A row at a time is read faster: 0.6 in place of 2.2 ms for the moments of 6 MB.
        """
        last = max(i for i in range(x.ndim) if i not in axis)
        if len(axis) > 1 and x.stride(last) == 1:
            return v.sum(max(axis), keepdim=True).double().sum(axis)
        return v.sum(axis).double()


def _broadcastable(v: Tensor, x: Tensor, axis: tuple[int, ...]) -> Tensor:
    return v.reshape([1 if i in axis else n for i, n in enumerate(x.shape)])
