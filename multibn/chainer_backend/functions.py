"""Multi-node batch normalization as a Chainer function."""

import math
from typing import Any, NoReturn

import chainer
import numpy as np
from chainer import FunctionNode, Variable

from multibn import recompute, statistics
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator, as_communicator
from multibn.statistics import BatchStatistics


def multi_node_batch_normalization(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    /,
    *,
    comm: Any = None,
    eps: float = 2e-5,
    axis: tuple[int, ...] | None = None,
    weighting: Weighting = "element",
) -> tuple[Variable, BatchStatistics]:
    """Normalize `x` by the statistics of the batch that all ranks hold together.

    Collective: every rank of `comm` must call it, a rank with an empty batch included, and must
    run the backward pass if any does. One allreduce of 2C+2 float64 numbers forward, one of 2C
    backward.

    Parameters
    ----------
    x
        Variable or array, shape `(N, C, *spatial)` unless `axis` says otherwise. N and the spatial
        sizes may differ between ranks and may be 0.
    gamma, beta
        Variables or arrays of the shape of the axes that are kept, `(C,)`; None for 1 and 0. Their
        gradients are means over the ranks, as ChainerMN's: averaging them again changes nothing.
    comm
        Anything that `multibn.as_communicator` takes.
    eps
        Added to the variance.
    axis
        The axes to reduce; by default all but those of `gamma`, counted from 1.
    weighting
        What a rank counts for, see `multibn.aggregate`.

    Returns
    -------
    y
        Same shape and dtype as `x`.
    batch
        Mean, biased variance and count of the whole batch, float64.

    Raises
    ------
    TypeError
        If `x` is not floating-point, or `comm` is no communicator.
    ValueError
        If the shapes do not fit, or all ranks hold one value per channel together.
    RuntimeError
        On the other ranks, if one rank's input was refused; and by differentiating twice, which is
        not supported.
    """
    communicator = as_communicator(comm)
    shapes = [tuple(p.shape) for p in (gamma, beta) if p is not None]
    if len(set(shapes)) > 1:
        error = ValueError(f"`gamma` and `beta` must have the same shape: got {shapes}.")
        _refuse(error, x, shapes[0], communicator)
    axis = check_input(x, shapes[0] if shapes else None, axis, communicator)
    batch = batch_statistics(x, communicator, weighting=weighting, axis=axis)
    return normalize(x, gamma, beta, batch, communicator, eps=eps, axis=axis), batch


def batch_statistics(
    x: Any, communicator: Communicator, /, *, weighting: Weighting, axis: tuple[int, ...]
) -> BatchStatistics:
    """Statistics of the whole batch over `axis`.

    Collective, unless they are replayed (see `multibn.recompute`).
    """

    def compute() -> BatchStatistics:
        return statistics.batch_statistics(
            chainer.as_array(x), communicator, weighting=weighting, axis=axis
        )

    return recompute.taped(compute, statistics.channels(x, axis))


def normalize(
    x: Any,
    gamma: Any,
    beta: Any,
    batch: BatchStatistics,
    communicator: Communicator,
    /,
    *,
    eps: float,
    axis: tuple[int, ...],
) -> Variable:
    """Normalize `x` by `batch`, differentiating through the statistics. Collective backward."""
    function = _Normalize(batch, communicator, eps, axis, gamma is not None, beta is not None)
    return function.apply([v for v in (x, gamma, beta) if v is not None])[0]


def check_input(
    x: Any,
    channels: tuple[int, ...] | None,
    axis: tuple[int, ...] | None,
    communicator: Communicator,
    /,
) -> tuple[int, ...]:
    """The axes to reduce; raises unless `x` is floating-point and its other axes are `channels`.

    If it raises, and only then, collective: the other ranks are told, so that they raise too
    instead of waiting. `channels=None` takes any channels but none. `axis=None` is Chainer's rule:
    the channel axes start at 1, all others are reduced.
    """
    if axis is None:
        num_channel_axes = 1 if channels is None else len(channels)
        axis = statistics.reduced_axes(getattr(x, "ndim", 0), range(1, 1 + num_channel_axes))
    error = _input_error(x, channels, axis)
    if error is not None:
        if channels is None and getattr(x, "ndim", 0) > max(axis, default=0):
            channels = statistics.channels(x, axis)
        _refuse(error, x, channels, communicator)
    return axis


def _refuse(
    error: Exception, x: Any, channels: tuple[int, ...] | None, communicator: Communicator
) -> NoReturn:
    """Raise `error` once the other ranks know; they cannot if the channels are not known here."""
    if channels is not None and 0 not in channels:
        like = chainer.as_array(x) if isinstance(x, _arrays()) else np.zeros(())
        statistics.refuse(communicator, math.prod(channels), like=like)
    raise error


def _arrays() -> Any:
    return (Variable, *chainer.get_array_types())


def _input_error(
    x: Any, channels: tuple[int, ...] | None, axis: tuple[int, ...]
) -> Exception | None:
    if not isinstance(x, _arrays()):
        return TypeError(f"the input must be a Variable or an array: got {type(x).__qualname__}.")
    if not axis or max(axis) >= x.ndim or x.ndim < 2:
        return ValueError(
            f"the input must have 2 or more dimensions and all of the axes to reduce, {axis}: "
            f"got shape {x.shape}."
        )
    kept = statistics.channels(x, axis)
    if 0 in kept:
        return ValueError(f"the input must have channels: got {kept} in shape {x.shape}.")
    if channels is not None and kept != channels:
        return ValueError(
            f"the input must have channels of shape {channels}, the link's `size` or the shape of "
            f"`gamma` and `beta`: got {kept} in shape {x.shape} with axes {axis} reduced."
        )
    if x.dtype.kind != "f":
        return statistics.not_floating(x)
    return None


class _Normalize(FunctionNode):
    """The statistics are given, their gradient is inside."""

    def __init__(
        self,
        batch: BatchStatistics,
        communicator: Communicator,
        eps: float,
        axis: tuple[int, ...],
        has_gamma: bool,
        has_beta: bool,
    ) -> None:
        super().__init__()
        self.batch, self.communicator, self.eps, self.axis = batch, communicator, eps, axis
        self.has_gamma, self.has_beta = has_gamma, has_beta

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        self.retain_inputs((0, 1) if self.has_gamma else (0,))
        x = inputs[0]
        y = statistics.normalize(
            x,
            self.batch,
            weight=inputs[1] if self.has_gamma else None,
            bias=inputs[-1] if self.has_beta else None,
            eps=self.eps,
            axis=self.axis,
        )
        return (y,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        return _NormalizeGrad(self).apply((*self.get_retained_inputs(), *grad_outputs))


class _NormalizeGrad(FunctionNode):
    """Gradients of `_Normalize`, one for each of its inputs."""

    def __init__(self, of: _Normalize) -> None:
        super().__init__()
        self.of = of

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        of = self.of
        x, *gamma, dy = inputs
        local = statistics.backward_sums(dy, x, of.batch, eps=of.eps, axis=of.axis)
        sums = statistics.aggregate_sums(local, of.communicator)
        weight = gamma[0] if gamma else None
        gradients = [
            statistics.input_gradient(
                dy, x, of.batch, sums, weight=weight, eps=of.eps, axis=of.axis
            )
        ]
        size = of.communicator.size
        if of.has_gamma:
            gradients.append((sums.sum_dy_xhat / size).astype(gamma[0].dtype, copy=False))
        if of.has_beta:
            beta_dtype = of.inputs[-1].dtype
            gradients.append((sums.sum_dy / size).astype(beta_dtype, copy=False))
        return tuple(gradients)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable, ...]) -> None:
        raise RuntimeError(
            "multi_node_batch_normalization cannot be differentiated twice. Use the layer of "
            "multibn.torch_backend, or take the gradient without enable_double_backprop."
        )
