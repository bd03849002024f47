"""Layers whose inputs are ready at the same time, in one message each way."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from multibn.communicators.base import identity
from multibn.communicators.conversation import Conversation
from multibn.torch_backend import functional
from multibn.torch_backend._autograd import Input
from multibn.torch_backend.modules import SyncBatchNorm

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def normalize_together(layers: Sequence[SyncBatchNorm], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`[layer(x) for layer, x in zip(layers, inputs)]` with one message each way.

    For batch norms none of which waits for another's output, as the last one of a residual block
    and the one of its downsampling branch::

        y, shortcut = normalize_together([self.bn2, self.downsample_bn], [y, shortcut])

    In training it is collective: every rank must call it with the same layers, with one allreduce
    of the 2C+2 float64 numbers of each layer, and 2 more; and one in the backward pass, if any
    input needs a gradient. It begins when the gradients of all outputs are
    there, and gives zeros to an input whose output was not used. Layers in evaluation communicate
    nothing, as ever.

    Layers with hooks, which see a call of the layer, are called one by one, and so are all in code
    that torch.compile compiles: the same numbers, with messages of their own. All ranks must do
    the same in this, too.

    Parameters
    ----------
    layers
        Layers of any numbers of channels, whose `process_group` and `weighting` are the same.
    inputs
        One for each layer, shape `(N, C, *spatial)`, of any shapes and floating-point dtypes, on
        one device.

    Returns
    -------
    list of Tensor
        What the layers give, `fuse_relu` included.

    Raises
    ------
    TypeError
        If one of `layers` is not a `SyncBatchNorm`, or has a `forward` of its own.
    ValueError
        If there are none, or not as many as `inputs`, or they differ in `process_group` or
        `weighting`.
    TypeError, ValueError, RuntimeError
        For an input that does not fit, on this rank and the others, as the layers do.
    """
    _check(layers, inputs)
    if torch.compiler.is_compiling() or any(getattr(layer, h) for h in _HOOKS for layer in layers):
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    pairs = list(zip(layers, inputs, strict=True))
    sharing = [(layer, x) for layer, x in pairs if layer.training]
    if not sharing:
        return [layer(x) for layer, x in pairs]
    communicator = _communicator([layer for layer, _ in sharing])
    num_features = [layer.num_features for layer, _ in sharing]
    try:
        evaluated = iter([layer(x) for layer, x in pairs if not layer.training])
    except (TypeError, ValueError) as error:  # before the other ranks wait for this one
        functional.refuse(error, [x for _, x in sharing], num_features, communicator)
    outputs = functional.forward_all(
        [Input(x, bn.weight, bn.bias, bn.eps, relu=bn.fuse_relu) for bn, x in sharing],
        num_features,
        communicator,
        weighting=layers[0].weighting,
    )
    for (layer, x), (_, batch) in zip(sharing, outputs, strict=True):
        layer.track(batch, x)
    trained = iter([y for y, _ in outputs])
    return [next(trained if layer.training else evaluated) for layer in layers]


def _check(layers: Sequence[SyncBatchNorm], inputs: Sequence[Tensor]) -> None:
    """Raise unless `layers` are such as can share a message, and `inputs` as many."""
    for layer in layers:
        if not isinstance(layer, SyncBatchNorm) or type(layer).forward is not SyncBatchNorm.forward:
            raise TypeError(
                "`layers` must be multibn.torch_backend.SyncBatchNorm layers: got "
                f"{type(layer).__qualname__}. Convert the model by convert_sync_batchnorm, or call "
                "the layer by itself."
            )
    if not layers or len(layers) != len(inputs):
        raise ValueError(
            "`layers` must be one or more, and `inputs` one for each: got "
            f"{len(layers)} layers and {len(inputs)} inputs."
        )
    first, *others = layers
    for other in others:
        if other.weighting != first.weighting:
            raise ValueError(
                "`layers` must have the same `weighting`: got "
                f"{first.weighting!r} and {other.weighting!r}. Call them one by one."
            )
        mine, theirs = first.process_group, other.process_group
        if mine is not theirs and identity(mine) != identity(theirs):
            raise ValueError(
                f"`layers` must have the same `process_group`: got {mine!r} and {theirs!r}. Call "
                "them one by one."
            )


# By the communicator of the first layer; what is made of several must outlive a step, in which
# their ranks are compared, and end with the layers.
_merged: WeakKeyDictionary[Conversation, dict[tuple[Any, ...], Conversation]] = WeakKeyDictionary()


def _communicator(layers: Sequence[SyncBatchNorm]) -> Conversation:
    """Who shares the statistics of all `layers`, as a communicator that names them."""
    parts = [layer._communicator for layer in layers]
    if len(parts) == 1:
        return parts[0]
    known = _merged.setdefault(parts[0], {})
    key = tuple(ref(part) for part in parts[1:])
    if key not in known:
        names = _together([part.name for part in parts])
        known[key] = Conversation(parts[0].wrapped, lambda: names, num_layers=len(parts))
    return known[key]


def _together(names: Sequence[str]) -> str:
    """The layers' names as one: "layer1.0.[bn2, downsample.1]"."""
    steps = [name.split(".") for name in names]
    parents = zip(*(path[:-1] for path in steps), strict=False)
    common = [step for step, *_ in takewhile(lambda level: len(set(level)) == 1, parents)]
    parts = ", ".join(".".join(path[len(common) :]) for path in steps)
    return ".".join([*common, f"[{parts}]"])
