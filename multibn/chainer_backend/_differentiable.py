"""The backward pass made of functions that Chainer can differentiate, for second derivatives.

Training steps take the analytic backward pass of `functions` instead, which needs less time and
memory. The ranks share sums; the derivative of such a sum is one more sum over the ranks.
"""

from typing import Any

import chainer
import numpy as np
from chainer import FunctionNode, Variable
from chainer import functions as F

from multibn._typing import Array
from multibn.communicators import Communicator
from multibn.engine import statistics


def gradients(node: Any, y: Array | None, *variables: Variable) -> dict[str, Variable]:
    """The gradient of each input, by the input's name.

    `node` is a `functions.BatchNormalization`, whose statistics are computed again, from `x`. The
    `variables` are the inputs that the node has retained and the gradient of the output; `y` is the
    output, if the pass ended in a ReLU.
    """
    *retained, dy = variables
    mask = node.input.mask
    dy = dy if y is None else _where(y > 0, dy)
    dresidual = masked(dy, mask)
    x, gamma, beta = node.filled(retained)[:3]
    axis, size = node.input.axis, node.communicator.size
    channels = statistics.channels(x.shape, axis)
    broadcastable = tuple(1 if i in axis else n for i, n in enumerate(x.shape))

    def per_channel(v: Any) -> Variable:
        return F.broadcast_to(F.reshape(v, broadcastable), x.shape)

    def sums(*vs: Variable) -> list[Variable]:
        packed = F.stack([F.sum(v, axis) for v in vs])
        (summed,) = _AllReduce(node.communicator).apply((packed,))
        return [F.reshape(v, channels) for v in F.separate(summed)]

    e = float(node.batch.element_weight)
    # Minus the mean, as a constant: otherwise the variance would lose digits to cancellation.
    d = masked(F.cast(x, np.float64) - per_channel(node.batch.mean), mask)
    dy = F.cast(dresidual, np.float64)
    mean, meansqr = sums(e * d, e * d * d)
    invstd = (meansqr - mean * mean + node.input.eps) ** -0.5
    xhat = masked((d - per_channel(mean)) * per_channel(invstd), mask)
    sum_dy, sum_dy_xhat = sums(dy, dy * xhat)
    dx = masked(dy - e * (per_channel(sum_dy) + xhat * per_channel(sum_dy_xhat)), mask)
    scale = invstd
    found = {"residual": dresidual}
    if gamma is not None:
        (copied,) = _Copied(node.communicator, 1 / size).apply((gamma,))
        scale = scale * F.cast(copied, np.float64)
        found["weight"] = F.cast(sum_dy_xhat / size, gamma.dtype)
    if beta is not None:
        found["bias"] = F.cast(sum_dy / size, beta.dtype)
    return found | {"x": F.cast(dx * per_channel(scale), x.dtype)}


def masked(v: Variable, mask: Array | None, /) -> Variable:
    """`v`, and 0 where the engine's mask is False."""
    return v if mask is None else _where(mask, v)


def _where(condition: Array, v: Variable) -> Variable:
    """`v`, and 0 where the condition, which broadcasts to `v`, is False."""
    xp = chainer.backend.get_array_module(condition)
    return F.where(xp.broadcast_to(condition, v.shape), v, xp.zeros(v.shape, v.dtype))


class _AllReduce(FunctionNode):
    """y = scale * sum over ranks of x. The backward pass is the same operation."""

    def __init__(self, communicator: Communicator, scale: float = 1.0) -> None:
        self.communicator, self.scale = communicator, scale

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        return (self.communicator.allreduce(inputs[0]) * inputs[0].dtype.type(self.scale),)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        return _AllReduce(self.communicator, self.scale).apply(grad_outputs)


class _Copied(_AllReduce):
    """y = x. The backward pass is that of `_AllReduce`."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        return (inputs[0].copy(),)
