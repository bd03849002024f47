"""Fusion of the two streams of a reversible network into one tensor."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from multibn._typing import check_int
from multibn.torch_backend.reversible.mvit.norms import NormFactory, layer_norm, normalize_last_axis

_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "avg": lambda a, b: (a + b) / 2,
    "max": torch.maximum,
    "min": torch.minimum,
}
_LINEAR = re.compile(r"(ln\+)?concat_linear(_(?P<width>[\d.]+))?(_(?P<drop>[\d.]+))?")


class Mlp(nn.Module):
    """Two linear layers with a GELU between them; the output is as wide as the input."""

    def __init__(self, dim: int, hidden: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class _NormedMlp(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        norm, mlp = self
        return mlp(normalize_last_axis(norm, x))


class TwoStreamFusion(nn.Module):
    """Fuse two streams `(B, N, C)`, which come side by side as `(B, N, 2C)`.

    Parameters
    ----------
    mode
        `"add"`, `"avg"`, `"max"` or `"min"` of the streams, `(B, N, C)`; `"concat"`, the input
        unchanged; `"concat_linear"`, `x + mlp(x)`. `"concat_linear_2"` makes the MLP's hidden layer
        twice as wide as the input, `"concat_linear_2_0.1"` adds dropout, and a prefix `"ln+"` puts
        a norm before the MLP.
    dim
        Width of the input, 2C.
    norm
        Factory of the norm of `"ln+"`, called with the role `"fuse"`.

    Raises
    ------
    TypeError, ValueError
        If `mode` is unknown, or `dim` is no positive int.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend.reversible import TwoStreamFusion
    >>> TwoStreamFusion("max", 4)(torch.tensor([[[1.0, 2.0, 5.0, 0.0]]]))
    tensor([[[5., 2.]]])
    """

    def __init__(self, mode: str, dim: int, norm: NormFactory = layer_norm) -> None:
        super().__init__()
        self.mode = mode
        check_int("dim", dim)
        linear = parse_mode("mode", mode)
        if linear is not None:
            width, drop_rate = linear
            mlp = Mlp(dim, int(dim * width), drop_rate)
            normed = mode.startswith("ln+")
            self.fuse_fn = _NormedMlp(norm(dim, "fuse"), mlp) if normed else mlp

    def forward(self, x: Tensor) -> Tensor:
        if self.mode in _ELEMENTWISE:
            return _ELEMENTWISE[self.mode](*x.chunk(2, dim=-1))
        return x if self.mode == "concat" else self.fuse_fn(x) + x


def keeps_width(mode: str) -> bool:
    """Whether a fusion of this mode returns a tensor as wide as both streams together."""
    return mode not in _ELEMENTWISE


def parse_mode(name: str, mode: str) -> tuple[float, float] | None:
    """Width factor and dropout rate of the MLP, None for modes without an MLP.

    `name` is the argument's, for the error.
    """
    if mode in _ELEMENTWISE or mode == "concat":
        return None
    numbers = _LINEAR.fullmatch(mode) if isinstance(mode, str) else None
    if numbers is None:
        raise ValueError(
            f"`{name}` must be 'add', 'avg', 'max', 'min', 'concat' or "
            f"'[ln+]concat_linear[_WIDTH[_DROPOUT]]': got {mode!r}."
        )
    return float(numbers["width"] or 1), float(numbers["drop"] or 0)
