"""Multi-node batch normalization as a node of Chainer's graph."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from operator import attrgetter
from types import MappingProxyType
from typing import Any
from weakref import ref

import chainer
import numpy as np
from chainer import FunctionNode, Variable
from chainer import functions as F

from multibn import kernels, wire
from multibn._arrays import array_namespace
from multibn._typing import Array, check_ints, check_residual
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import reject_input
from multibn.communicators.nonfinite import raise_for_nan_gradients
from multibn.communicators.resolve import default_group
from multibn.engine import masks, statistics
from multibn.engine.plan import Gradient, NormArgs, Plan
from multibn.kernels import layout, reference
from multibn.kernels.spec import unpack


def plan_key(x: Any, residual: Any, link: Any, finetune: bool) -> tuple[Any, ...] | None:
    """Return the cache key of the plan for a call of `link`; None if it cannot be cached.

    The key leaves out the link's options: `LayerCommunicator` keeps the plans of each set apart.
    """
    array, added = getattr(x, "array", x), getattr(residual, "array", residual)
    are_arrays = type(array) is np.ndarray and (residual is None or type(added) is np.ndarray)
    if not are_arrays or chainer.config.schedule_func is not None:
        return None
    gamma, beta, world = link.gamma, link.beta, default_group()
    needed = chainer.config.enable_backprop and (
        getattr(x, "requires_grad", False)
        or getattr(gamma, "requires_grad", False)
        or getattr(beta, "requires_grad", False)
        or getattr(residual, "requires_grad", False)
    )
    key = [array.shape, array.dtype, needed, finetune, chainer.config.in_recomputing]
    key += gamma is None, beta is None
    parameters = getattr(gamma, "array", gamma), getattr(beta, "array", beta)
    for v in (*parameters, link.avg_mean, link.avg_var):
        key += getattr(v, "shape", None), getattr(v, "dtype", None)
    if residual is not None:
        key += added.shape, added.dtype
    key.append(world and ref(world))  # weak: a plan keeps no group alive
    return tuple(key)


def prepare(args: NormArgs, link: Any, finetune: bool) -> Plan:
    """Return a plan for a call of `link` with these arguments. Not collective."""
    if chainer.config.schedule_func is not None:
        raise NotImplementedError(
            "ranks cannot share batch statistics inside chainer.static_graph, which would repeat "
            "the statistics of the first batch. Remove the decorator for training."
        )
    arrays = args.x, args.weight, args.bias, args.residual
    needed = any(getattr(v, "requires_grad", False) for v in arrays)
    return Plan(
        args._replace(x=chainer.as_array(args.x)),
        link.layer_communicator,
        weighting=link.weighting,
        needs_gradient=chainer.config.enable_backprop and needed,
        finetune=finetune and not chainer.config.in_recomputing,
    )


def checked(
    args: NormArgs,
    channels: tuple[int, ...],
    communicator: Communicator,
    /,
    *,
    check_options: Callable[[], None] = lambda: None,
    averages: Mapping[str, Any] = MappingProxyType({}),
    lengths: Any = None,
) -> NormArgs:
    """Return a call's arguments, with the axes to reduce and the engine's mask.

    `args.axis` and `args.mask` are the user's. Raise unless `x` is floating-point, its other axes
    have shape `channels`, `check_options` does not raise, and all other arrays fit. Errors show the
    moving `averages` by name. Collective only if it raises: then all ranks raise.
    """
    x, residual = args.x, args.residual
    array, types = chainer.as_array(x), chainer.get_array_types()
    like: Any = np.zeros(())
    try:
        check_options()
        axis = as_axes(args.axis, len(channels), getattr(x, "ndim", 0))
        if not isinstance(array, types):
            kind = type(x).__qualname__ + " without an array" * (array is not x)
            raise TypeError(f"the input must be a Variable or an array: got {kind}.")
        array_namespace(array)
        like = array
        if not axis or max(axis) >= x.ndim or x.ndim < 2:
            raise ValueError(
                "the input must have at least 2 dimensions and include the axes to reduce, "
                f"{axis}: got shape {x.shape}."
            )
        if (actual := layout.channels(x.shape, axis)) != channels:
            raise ValueError(
                f"the input must have channels of shape {channels}, the link's `size`: got "
                f"{actual} in shape {x.shape} with axes {axis} reduced."
            )
        if x.dtype.kind != "f":
            raise statistics.not_floating(x)
        parameters = {"gamma": args.weight, "beta": args.bias}
        given = {name: v for name, v in parameters.items() if v is not None}
        _check_parameters({**given, **averages}, channels)
        if residual is not None:
            check_residual(residual, x, (Variable, *types), "a Variable or an array")
        kernels.select(array)  # may warn, which may be an error of this rank alone
        mask = masks.as_mask(array, args.mask, lengths, axis=axis)
        return args._replace(axis=axis, mask=mask)
    except (TypeError, ValueError, Warning) as error:
        reject_input(communicator, error, math.prod(channels), like)
        raise


def as_axes(axis: Any, num_channel_axes: int, ndim: int) -> tuple[int, ...]:
    """Return the axes to reduce, in order.

    None means all but the channel axes, which then start at axis 1. Raise TypeError or ValueError
    unless an input of a link can have such axes.
    """
    if axis is None:
        return statistics.reduced_axes(ndim, range(1, 1 + num_channel_axes))
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    check_ints("axis", axes, least=0)
    axes, ndim = tuple(sorted(map(int, axes))), len(axes) + num_channel_axes
    if not axes or len({*axes}) < len(axes) or axes[-1] >= ndim:
        raise ValueError(
            f"`axis` must have 1 or more axes, each once and below {ndim}, the number of axes of "
            f"an input with this `size`: got {axis!r}. None reduces all but the channel axes."
        )
    return axes


def _check_parameters(parameters: Mapping[str, Any], channels: tuple[int, ...]) -> None:
    """Raise ValueError unless parameters and moving averages have a number for each channel."""
    for name, v in parameters.items():
        v = chainer.as_array(v)
        shape, dtype = getattr(v, "shape", None), getattr(v, "dtype", None)
        if shape != channels or getattr(dtype, "kind", None) != "f":
            got = f"shape {shape} in {dtype}" if dtype else type(v).__qualname__
            raise ValueError(
                f"`{name}` must have shape {channels}, a number for each channel of the input, in "
                f"floating point: got {got}."
            )


_constant = partial(Variable, requires_grad=False)


# Sequence numbers of calls, 2**32 apart: Chainer adds 1 for each node that follows a call.
_sequence_numbers = count(1 << 32, 1 << 32)


class _CollectiveNode(FunctionNode):
    """A node whose backward pass is collective: all ranks run it in the reverse order of calls.

    Chainer next runs the node with the largest `rank` (not a process's), by default its depth.
    Depths may differ between processes: F.sum and F.broadcast_to add no node if the shape is
    unchanged. The number of a call, like a sequence number of torch's, is the same on all.
    """

    _sequence_number = 0

    def _set_sequence_number(self, depth: int) -> None:
        self._sequence_number = next(_sequence_numbers)

    rank = property(attrgetter("_sequence_number"), _set_sequence_number)


class BatchNormalization(_CollectiveNode):
    """Normalization by `batch`. The gradient of x includes the one through the statistics.

    Computational graphs and function hooks show the name of this class, which is Chainer's.
    """

    batch: Any  # the statistics, perhaps packed

    def __init__(self, plan: Plan, args: NormArgs) -> None:
        super().__init__()
        self.plan, self.communicator = plan, plan.communicator
        self.eps = args.eps  # for onnx_chainer
        # Without arrays: Chainer keeps those that the backward pass needs.
        self.args = args._replace(x=None, weight=None, bias=None, residual=None)

    @property
    def axis(self) -> tuple[int, ...]:
        """The axes to reduce, for the node that onnx_chainer makes in training."""
        if self.args.relu or self.args.mask is not None or "residual" in self.plan.given:
            raise NotImplementedError(
                "ONNX has no batch normalization with a mask, a residual or a ReLU inside. Export "
                "the model with train=False."
            )
        return self.plan.axis

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        given = self.plan.given
        self.retain_inputs(tuple(range(len(inputs) - ("residual" in given))))
        if self.args.relu:
            self.retain_outputs((0,))
        args = self.args._replace(**dict(zip(given, inputs, strict=True)))
        y, self.batch = self.plan.forward(args)
        self.args = self.args._replace(running=None)  # a graph need not keep moving averages
        return (y,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        given, args = self.plan.given, self.args
        inputs = self.get_retained_inputs()
        y = self.get_retained_outputs()[0].array if args.relu else None
        if chainer.config.enable_backprop:  # enable_double_backprop=True
            args = args._replace(**dict(zip(given, inputs, strict=False)))
            dy = masked(grad_outputs[0], args.mask if y is None else y > 0)
            found = self._differentiable_gradients(args, dy)
            return (*found, dy)[: len(given)]
        (dy,) = map(chainer.as_array, grad_outputs)
        if chainer.is_debug():
            counted = reference.masked(dy, args.mask)
            raise_for_nan_gradients(self.communicator, bool((counted != counted).any()))
        arrays = dict(zip(given, map(chainer.as_array, inputs), strict=False))
        args = args._replace(**arrays)
        has_residual = "residual" in given
        # Without a residual, the kernel recomputes the sign of the output (for the ReLU) from `x`.
        g = Gradient(dy, args, self.batch, y if has_residual else None)
        dx, dresidual, dweight, dbias = self.plan.backward(g, means=True)
        if has_residual and dresidual is None:
            dresidual = reference.residual_gradient(g)
        gradients = {"x": dx, "weight": dweight, "bias": dbias, "residual": dresidual}
        return tuple(map(_constant, map(gradients.get, given)))

    def _differentiable_gradients(self, args: NormArgs, dy: Variable) -> list[Variable]:
        """Gradients of x and the parameters, by functions that Chainer can differentiate.

        Only for second derivatives: the analytic pass takes less time and memory. The derivative of
        a sum over the ranks is one more such sum. `dy` is the residual's gradient: 0 where the mask
        is False or the output of the ReLU is 0.
        """
        x, gamma, beta, eps, axis = args.x, args.weight, args.bias, args.eps, args.axis
        size = self.communicator.size
        broadcastable = tuple(1 if k in axis else n for k, n in enumerate(x.shape))
        payload = wire.forward_payload(math.prod(self.plan.channels))
        message_args = self.communicator, x.dtype, payload

        def per_channel(v: Any) -> Variable:
            return F.broadcast_to(F.reshape(v, broadcastable), x.shape)

        def sums(*terms: Variable) -> Sequence[Variable]:
            return F.separate(_AllReduce("second order", *message_args).apply((F.stack(terms),))[0])

        batch = unpack(self.batch)
        e = float(batch.element_weight)
        # Subtract the mean as a constant: otherwise the variance would suffer from cancellation.
        d = masked(F.cast(x, np.float64) - per_channel(batch.mean), args.mask)
        mean, meansqr = sums(F.sum(e * d, axis), F.sum(e * d * d, axis))
        scales = [invstd := (meansqr - mean * mean + eps) ** -0.5]
        if gamma is not None:
            scales += _MeanGradient("gradient", *message_args).apply((F.cast(gamma, np.float64),))
        xhat = (d - per_channel(mean)) * per_channel(invstd)
        dy = F.cast(dy, np.float64)
        sum_dy, sum_dy_xhat = sums(F.sum(dy, axis), F.sum(dy * xhat, axis))
        dx = masked(dy - e * (per_channel(sum_dy) + xhat * per_channel(sum_dy_xhat)), args.mask)
        for scale in scales:
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


class _AllReduce(_CollectiveNode):
    """y = sum over ranks of x. The backward pass is the same operation.

    The message is as long as the layer's forward message and carries its layer and phase, so that a
    mismatch between ranks is detected.
    """

    def __init__(self, phase: str, *message_args: Any) -> None:
        self.phase, self.message_args = phase, message_args

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        (x,) = inputs
        communicator, dtype, n = self.message_args
        sent = array_namespace(x).zeros(n)
        sent[: x.size] = x.ravel()
        summed = communicator.for_phase(self.phase, dtype, n).allreduce(sent)
        return (summed[: x.size].reshape(x.shape),)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        return _AllReduce("gradient", *self.message_args).apply(grad_outputs)


class _MeanGradient(_AllReduce):
    """A parameter, equal on all ranks. Its gradient is the mean of the ranks' gradients."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return inputs

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        (summed,) = super().backward(indexes, grad_outputs)
        return (summed / self.message_args[0].size,)
