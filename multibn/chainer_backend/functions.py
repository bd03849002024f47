"""Multi-node batch normalization as a node of Chainer's graph."""

import math
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainer import FunctionNode, Variable
from chainer import functions as F

from multibn._arrays import array_namespace
from multibn._typing import Array, Weighting, check_residual
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import during
from multibn.communicators.nonfinite import raise_for_nan_gradients
from multibn.engine import masks, statistics, step
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Gradient, NormArgs
from multibn.kernels import reference


def normalize(args: NormArgs, communicator: Communicator, /, *, weighting: Weighting) -> Variable:
    """`args.x` normalized by the whole batch; moves `args.running` in place.

    Collective, as its backward pass.
    """
    if chainer.config.schedule_func is not None:
        raise NotImplementedError(
            "ranks cannot share batch statistics inside chainer.static_graph, which would repeat "
            "those of the first batch. Remove the decorator, which may stay for evaluation."
        )
    function = BatchNormalization(args, communicator, weighting)
    arrays = [getattr(args, name) for name in function.names]
    function.needed = chainer.config.enable_backprop and any(
        getattr(v, "requires_grad", False) for v in arrays
    )
    return function.apply(arrays)[0]


def check_input(
    x: Any,
    channels: tuple[int, ...],
    axis: tuple[int, ...] | None,
    communicator: Communicator,
    /,
    *,
    residual: Any = None,
    mask: Any = None,
    lengths: Any = None,
) -> tuple[tuple[int, ...], Array | None]:
    """The axes to reduce, and the engine's mask.

    Raises unless `x` is floating-point, its other axes are `channels`, and mask and residual fit.
    Collective only if it raises: then the other ranks raise, too. `axis=None` is Chainer's rule:
    the channel axes start at 1, all others are reduced.
    """
    if axis is None:
        axis = statistics.reduced_axes(getattr(x, "ndim", 0), range(1, 1 + len(channels)))
    array, like, types = chainer.as_array(x), None, chainer.get_array_types()
    try:
        if not isinstance(array, types):
            kind = type(x).__qualname__ + " without an array" * (array is not x)
            raise TypeError(f"the input must be a Variable or an array: got {kind}.")
        array_namespace(array)
        like = array
        if not axis or max(axis) >= x.ndim or x.ndim < 2:
            raise ValueError(
                "the input must have 2 or more dimensions and all of the axes to reduce, "
                f"{axis}: got shape {x.shape}."
            )
        if (actual := statistics.channels(x.shape, axis)) != channels:
            raise ValueError(
                f"the input must have channels of shape {channels}, the link's `size`: got "
                f"{actual} in shape {x.shape} with axes {axis} reduced."
            )
        if x.dtype.kind != "f":
            raise statistics.not_floating(x)
        if residual is not None:
            check_residual(residual, x, (Variable, *types), "a Variable or an array")
        return axis, masks.checked(array, mask, lengths, axis=axis)
    except (TypeError, ValueError) as error:
        like = np.zeros(()) if like is None else like
        statistics.refuse(communicator, math.prod(channels), like=like, error=error)
        raise


# The arguments of a pass that are inputs of a node, in their order.
_INPUTS = "x", "weight", "bias", "residual"


class BatchNormalization(FunctionNode):
    """Normalization by `batch`. The gradient of x includes the one through the statistics.

    Computational graphs and function hooks show the name of this class, which is Chainer's.
    """

    batch: BatchStatistics
    needed = True  # whether a backward pass may follow

    def __init__(self, args: NormArgs, communicator: Communicator, weighting: Weighting) -> None:
        super().__init__()
        self.communicator, self._weighting = communicator, weighting
        # Not `args` itself: of the arrays, Chainer keeps those that the backward pass needs.
        self.input = args._replace(x=None, weight=None, bias=None, residual=None)
        self.names = [name for name in _INPUTS if getattr(args, name) is not None]
        self.eps = args.eps  # read by onnx_chainer, as `axis`

    @property
    def axis(self) -> tuple[int, ...]:
        """The axes to reduce, for the node that onnx_chainer makes in training."""
        if self.input.relu or self.input.mask is not None or "residual" in self.names:
            raise NotImplementedError(
                "ONNX has no batch normalization with a mask, a residual or a ReLU inside. Export "
                "the model with train=False."
            )
        return self.input.axis

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        self.retain_inputs([k for k, name in enumerate(self.names) if name != "residual"])
        if self.input.relu:
            self.retain_outputs((0,))
        args = self._filled(inputs)
        running: Any = getattr(args.running, "running", args.running)  # of a pool
        facts = self.needed, running is not None and running.momentum is None  # finetune=True
        communicator = during(self.communicator, "forward", args.x.dtype, *facts)
        y, self.batch = step.forward(args, communicator, weighting=self._weighting)
        # The graph need not keep running statistics.
        self.input = self.input._replace(running=None)
        return (y,)

    def _filled(self, inputs: Sequence[Any]) -> NormArgs:
        """The arguments of the pass, with the node's inputs, or those retained, in their places."""
        return self.input._replace(**dict(zip(self.names, inputs, strict=False)))

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        inputs = self.get_retained_inputs()
        y = self.get_retained_outputs()[0].array if self.input.relu else None
        if chainer.config.enable_backprop:  # enable_double_backprop=True
            dy = masked(grad_outputs[0], self.input.mask if y is None else y > 0)
            found = self._differentiable_gradients(self._filled(inputs), dy)
            return (*found, dy)[: len(self.names)]
        (dy,) = map(chainer.as_array, grad_outputs)
        if chainer.is_debug():
            counted = reference.masked(dy, self.input.mask)
            raise_for_nan_gradients(self.communicator, bool((counted != counted).any()))
        args = self._filled([*map(chainer.as_array, inputs)])
        has_residual = "residual" in self.names
        # Without a residual, `x` has the signs.
        g = Gradient(dy, args, self.batch, y if has_residual else None)
        dx, dresidual, *parameters = step.backward(g, self.communicator, means=True)
        if has_residual and dresidual is None:
            dresidual = reference.residual_gradient(g)
        gradients = [v for v in (dx, *parameters, dresidual) if v is not None]
        return tuple(Variable(gradient, requires_grad=False) for gradient in gradients)

    def _differentiable_gradients(self, args: NormArgs, dy: Variable) -> list[Variable]:
        """Gradients of x and the parameters, by functions that Chainer can differentiate.

        For second derivatives: the analytic pass needs less time and memory. The ranks share sums;
        the derivative of such a sum is one more sum over the ranks. `dy` is the gradient of the
        residual: 0 where the mask is False, or a ReLU gave 0.
        """
        x, gamma, beta, eps, axis = args.x, args.weight, args.bias, args.eps, args.axis
        size = self.communicator.size
        broadcastable = tuple(1 if k in axis else n for k, n in enumerate(x.shape))

        def per_channel(v: Any) -> Variable:
            return F.broadcast_to(F.reshape(v, broadcastable), x.shape)

        def sums(*terms: Variable) -> Sequence[Variable]:
            return F.separate(_AllReduce(self.communicator).apply((F.stack(terms),))[0])

        e = float(self.batch.element_weight)
        # Minus the mean, as a constant: otherwise the variance would lose digits to cancellation.
        d = masked(F.cast(x, np.float64) - per_channel(self.batch.mean), args.mask)
        # All ranks hold the same gamma, so that its mean changes nothing but the gradients.
        shared = [] if gamma is None else [F.cast(gamma, np.float64) / size]
        mean, meansqr, *shared = sums(F.sum(e * d, axis), F.sum(e * d * d, axis), *shared)
        invstd = (meansqr - mean * mean + eps) ** -0.5
        xhat = masked((d - per_channel(mean)) * per_channel(invstd), args.mask)
        dy = F.cast(dy, np.float64)
        sum_dy, sum_dy_xhat = sums(F.sum(dy, axis), F.sum(dy * xhat, axis))
        dx = masked(dy - e * (per_channel(sum_dy) + xhat * per_channel(sum_dy_xhat)), args.mask)
        for scale in (invstd, *shared):
            dx = dx * per_channel(scale)
        found = [F.cast(dx, x.dtype)]
        parameters = (gamma, sum_dy_xhat), (beta, sum_dy)
        return found + [F.cast(g / size, v.dtype) for v, g in parameters if v is not None]


def masked(v: Variable, mask: Array | None, /) -> Variable:
    """`v`, and 0 where the mask, which broadcasts to `v`, is False."""
    if mask is None:
        return v
    xp = chainer.backend.get_array_module(mask)
    return F.where(xp.broadcast_to(mask, v.shape), v, xp.zeros(v.shape, v.dtype))


class _AllReduce(FunctionNode):
    """y = sum over ranks of x. The backward pass is the same operation."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        return (self.communicator.allreduce(inputs[0]),)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        return _AllReduce(self.communicator).apply(grad_outputs)
