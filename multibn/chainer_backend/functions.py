"""Multi-node batch normalization as a Chainer function."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import chainer
import numpy as np
from chainer import FunctionNode, Variable

from multibn._typing import Array, Weighting, check_choice, check_eps, check_ints, check_residual
from multibn.chainer_backend import _differentiable
from multibn.communicators import Communicator, CommunicatorLike, as_communicator
from multibn.communicators.conversation import Conversation
from multibn.communicators.outcomes import Nonfinite, raise_for_nan_gradients
from multibn.engine import masks, statistics, step
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Gradient, Input
from multibn.kernels import generic


def multi_node_batch_normalization(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    /,
    *,
    comm: CommunicatorLike = None,
    eps: float = 2e-5,
    axis: tuple[int, ...] | None = None,
    weighting: Weighting = "element",
    nonfinite: Nonfinite = None,
    mask: Any = None,
    lengths: Any = None,
) -> tuple[Variable, BatchStatistics]:
    """Normalize `x` by the statistics of the batch that all ranks hold together.

    Collective: every rank of `comm` must call it, a rank with an empty batch included, and must
    run the backward pass if any rank does. One allreduce of 2C+4 float64 numbers each way.

    Parameters
    ----------
    x
        Floating-point Variable or array, `(N, C, *spatial)` for the default of `axis`. N and the
        spatial sizes may differ between ranks and may be 0. A Variable may have cuDNN's
        channels-last layout (`chainer.config.compute_mode = "cudnn_fast"`).
    gamma, beta
        Variables or arrays, shape `(C,)` or that of the axes not in `axis`; None for 1 and 0. Their
        gradients are means over the ranks, as ChainerMN's: averaging them again changes nothing.
    comm, eps, weighting, nonfinite
        As `MultiNodeBatchNormalization`.
    axis
        The axes to reduce; by default all but those of `gamma`, counted from 1.
    mask, lengths
        Which elements count, as in a call of `MultiNodeBatchNormalization`; None for all.

    Returns
    -------
    y
        Same shape, dtype and layout as `x`; 0 where elements do not count.
    batch
        Mean, biased variance and count of the whole batch, float64.

    Raises
    ------
    TypeError, ValueError
        If `x` is not floating-point, the shapes do not fit, `comm` is no communicator, or `eps` or
        `axis` is not as for `MultiNodeBatchNormalization`. ValueError if all ranks hold one value
        per channel together.
    RuntimeError
        On the other ranks, if one rank's input was refused. On all ranks, if they are in different
        layers, or in different phases of one layer.
    FloatingPointError
        On all ranks, if the moments of one rank are not finite (on a GPU a step later), unless
        such a batch is skipped, see `nonfinite`.
    NotImplementedError
        Inside chainer.static_graph.

    Notes
    -----
    Second derivatives (`enable_double_backprop=True`) are exact over ranks. At every order,
    gradients are those of the sum of all ranks' losses, divided by the number of ranks for `gamma`
    and `beta`. A backward pass with a graph computes in float64 and repeats the forward pass's
    allreduce; each of its allreduces has another one in the next derivative.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn import SingleProcess
    >>> from multibn.chainer_backend import multi_node_batch_normalization
    >>> x = np.asarray([[1], [3]], "f")
    >>> y, batch = multi_node_batch_normalization(x, comm=SingleProcess())
    >>> print(y.array.ravel().round(3), batch.mean)
    [-1.  1.] [2.]
    """
    options: dict[str, object] = {"nonfinite": nonfinite}
    group, own_name = as_communicator(comm), "multi_node_batch_normalization"
    communicator = Conversation(group, lambda: own_name, options=lambda: options)
    v = standard_layout(x)
    shapes = [tuple(p.shape) for p in (gamma, beta) if isinstance(p, _arrays())]
    channels = shapes[0] if shapes else None
    try:
        check_eps(eps)
        check_choice("weighting", weighting, Weighting)
        check_choice("nonfinite", nonfinite, Nonfinite)
        axis = None if axis is None else checked_axes(axis)
        for name, parameter in (("gamma", gamma), ("beta", beta)):
            if parameter is not None and not isinstance(parameter, _arrays()):
                kind = type(parameter).__qualname__
                raise TypeError(f"`{name}` must be a Variable or an array: got {kind}.")
        if len(set(shapes)) > 1:
            raise ValueError(f"`gamma` and `beta` must have the same shape: got {shapes}.")
    except (TypeError, ValueError) as error:
        _refuse(error, v, channels, communicator)
    options |= {"eps": eps, "weighting": weighting}
    axis, where = check_input(v, channels, axis, communicator, mask=mask, lengths=lengths)
    i = Input(v, gamma, beta, eps, axis, mask=where)
    y, batch = normalize(i, communicator, weighting=weighting)
    return with_layout_of(x, y), batch


def normalize(
    i: Input, communicator: Communicator, /, *, weighting: Weighting
) -> tuple[Variable, BatchStatistics]:
    """`i.x` normalized by the whole batch, and the statistics; moves `i.running` in place.

    Collective, as its backward pass.
    """
    if chainer.config.schedule_func is not None:
        raise NotImplementedError(
            "ranks cannot share batch statistics inside chainer.static_graph, which would repeat "
            "those of the first batch. Remove the decorator, which may stay for evaluation."
        )
    function = BatchNormalization(i, communicator, weighting)
    arrays = [v for v in (i.x, i.weight, i.bias, i.residual) if v is not None]
    function.needed = chainer.config.enable_backprop and any(
        getattr(v, "requires_grad", False) for v in arrays
    )
    (y,) = function.apply(arrays)
    return y, function.batch


def standard_layout(x: Any, /) -> Any:
    """`x` as a Variable whose array has the shape `(N, C, *spatial)`; a view, differentiable.

    The array of a Variable in cuDNN's channels-last layout has the shape `(N, *spatial, C)`, and
    Chainer's functions refuse such a Variable.
    """
    return x.as_layout(None) if isinstance(x, Variable) else x


def with_layout_of(x: Any, y: Variable, /) -> Variable:
    """`y` in the layout of `x`, which may be an array."""
    return y.as_layout(x.layout) if isinstance(x, Variable) else y


def checked_axes(axis: Any, /) -> tuple[int, ...]:
    """The axes to reduce; raises for `axis` unless it is an int or an ascending tuple of ints."""
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    check_ints("axis", axes, least=0)
    if not axes or list(axes) != sorted(set(axes)):
        raise ValueError(
            f"`axis` must be an axis counted from 0 or an ascending tuple of them: got {axis!r}."
        )
    return axes


def check_input(
    x: Any,
    channels: tuple[int, ...] | None,
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
    Collective only if it raises: then the other ranks raise, too. `channels=None` accepts any shape
    without 0. `axis=None` is Chainer's rule: the channel axes start at 1, all others are reduced.
    """
    ndim = getattr(x, "ndim", 0)
    if axis is None:
        num_channel_axes = 1 if channels is None else len(channels)
        axis = statistics.reduced_axes(ndim, range(1, 1 + num_channel_axes))
    try:
        _check(x, channels, axis)
        if residual is not None:
            check_residual(residual, x, _arrays(), "a Variable or an array")
        return axis, masks.checked(chainer.as_array(x), mask, lengths, axis=axis)
    except (TypeError, ValueError) as error:
        if channels is None and ndim > max(axis, default=0):
            channels = statistics.channels(x.shape, axis)
        _refuse(error, x, channels, communicator)


def _refuse(
    error: Exception, x: Any, channels: tuple[int, ...] | None, communicator: Communicator
) -> NoReturn:
    """Raise `error`, and let the other ranks raise too. Collective if channels can be told.

    Without the caller's, `x` has them, for an axis that `x` lacks those of the default axes.
    """
    if channels is None and getattr(x, "ndim", 0) > 1:
        channels = tuple(x.shape[1:2])
    if channels is not None and 0 not in channels:
        like = chainer.as_array(x) if isinstance(x, _arrays()) else np.zeros(())
        statistics.refuse(communicator, math.prod(channels), like=like, error=error)
    raise error


def _arrays() -> Any:
    return (Variable, *chainer.get_array_types())


def _check(x: Any, channels: tuple[int, ...] | None, axis: tuple[int, ...]) -> None:
    if not isinstance(x, _arrays()):
        raise TypeError(f"the input must be a Variable or an array: got {type(x).__qualname__}.")
    if not axis or max(axis) >= x.ndim or x.ndim < 2:
        raise ValueError(
            f"the input must have 2 or more dimensions and all of the axes to reduce, {axis}: "
            f"got shape {x.shape}."
        )
    actual = statistics.channels(x.shape, axis)
    if 0 in actual:
        raise ValueError(f"the input must have channels: got {actual} in shape {x.shape}.")
    if channels is not None and actual != channels:
        raise ValueError(
            f"the input must have channels of shape {channels}, the link's `size` or the shape of "
            f"`gamma` and `beta`: got {actual} in shape {x.shape} with axes {axis} reduced."
        )
    if x.dtype.kind != "f":
        raise statistics.not_floating(x)


# The arguments of a pass that are inputs of a node, in their order.
_INPUTS = ("x", "weight", "bias", "residual")


class BatchNormalization(FunctionNode):
    """Normalization by `batch`. The gradient of x includes the one through the statistics.

    Computational graphs and function hooks show the name of this class, which is Chainer's.
    """

    batch: BatchStatistics
    needed = True  # whether a backward pass may follow

    def __init__(self, i: Input, communicator: Communicator, weighting: Weighting) -> None:
        super().__init__()
        self.communicator, self._weighting = communicator, weighting
        # Not `i` itself: of the arrays, Chainer keeps those that the backward pass needs.
        self.input = i._replace(x=None, weight=None, bias=None, residual=None)
        self.names = [name for name in _INPUTS if getattr(i, name) is not None]

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array]:
        self.retain_inputs([n for n, name in enumerate(self.names) if name != "residual"])
        if self.input.relu:
            self.retain_outputs((0,))
        y, self.batch = step.forward(
            self.filled(inputs),
            self.communicator,
            weighting=self._weighting,
            needs_gradient=self.needed,
        )
        # The graph need not keep running statistics.
        self.input = self.input._replace(running=None)
        return (y,)

    def filled(self, inputs: Sequence[Any]) -> Input:
        """The arguments of the pass, with the node's inputs, or those retained, in their places."""
        return self.input._replace(**dict(zip(self.names, inputs, strict=False)))

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
    ) -> tuple[Variable, ...]:
        inputs: Any = (*self.get_retained_inputs(), *grad_outputs)
        y = chainer.as_array(self.get_retained_outputs()[0]) if self.input.relu else None
        if chainer.config.enable_backprop:  # enable_double_backprop=True
            found = _differentiable.gradients(self, y, *inputs)
            return tuple(found[name] for name in self.names)
        *retained, dy = map(chainer.as_array, inputs)
        if chainer.is_debug():
            counted = generic.masked(dy, self.input.mask)
            raise_for_nan_gradients(self.communicator, bool((counted != counted).any()))
        has_residual = "residual" in self.names
        # Without a residual, `x` has the signs.
        g = Gradient(dy, self.filled(retained), self.batch, y if has_residual else None)
        dx, dresidual, dweight, dbias = step.backward(g, self.communicator, means=True)
        if has_residual and dresidual is None:
            dresidual = generic.residual_gradient(g)
        gradients: Any = {"x": dx, "weight": dweight, "bias": dbias, "residual": dresidual}
        return tuple(Variable(gradients[name], requires_grad=False) for name in self.names)
