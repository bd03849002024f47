"""The input of one layer, and how a pass treats several of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def dtypes(xs: Sequence[Tensor], /) -> Any:
    """The dtype that a message about `xs` announces: one dtype, or the names of several."""
    if len(xs) == 1:
        return xs[0].dtype
    return ", ".join(str(x.dtype).rpartition(".")[2] for x in xs)


def without_autocast(x: Any, /) -> AbstractContextManager[Any]:
    """A context in which operations on tensors like `x` keep their dtypes."""
    kind = "cpu" if x.is_cpu else x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


_NOTHING = nullcontext()
