"""The input of one layer, and how a pass treats several of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multibn.communicators import Communicator, conversation


class Input(NamedTuple):
    """The input of one layer, with the layer's parameters and options.

    `axis` names the axes to reduce; `()` stands for all but 1 until `functional.forward_all` fills
    them in. `weight` and `bias` have the shape of the other axes, `(C,)`. `residual`, a tensor like
    `x`, is added to the normalized input; `relu` follows the addition.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    axis: tuple[int, ...] = ()
    residual: Tensor | None = None
    relu: bool = False


def during(communicator: Communicator, phase: str, xs: Sequence[Tensor], /) -> Communicator:
    """`conversation.during` for messages about `xs`, which may differ in dtype."""
    if len(xs) == 1:
        return conversation.during(communicator, phase, xs[0].dtype)
    names = ", ".join(str(x.dtype).rpartition(".")[2] for x in xs)
    return conversation.during(communicator, phase, names)


def without_autocast(x: Any, /) -> AbstractContextManager[Any]:
    """A context in which operations on tensors like `x` keep their dtypes."""
    kind = "cpu" if x.is_cpu else x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


_NOTHING = nullcontext()
