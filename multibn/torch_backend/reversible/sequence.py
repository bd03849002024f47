"""A chain of reversible blocks as a module."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multibn._typing import check_choice
from multibn.torch_backend.reversible import engine
from multibn.torch_backend.reversible.engine import Block, Mode


class ReversibleSequence(nn.Module):
    """Blocks `y1 = x1 + F(x2); y2 = x2 + G(y1)` whose memory does not grow with their number.

    In training, autograd saves the outputs of the last block only; the backward pass recomputes
    each block's inputs and runs F and G again (Gomez et al. 2017, Mangalam et al. 2022). The rest
    of the program sees an ordinary chain: DistributedDataParallel, hooks, frozen and shared
    parameters, random numbers and autocast work as usual, and batch norms count each batch once.

    Parameters
    ----------
    blocks
        Pairs `(F, G)` of modules, called `layers.{i}.F` and `layers.{i}.G` in the state dict.
    mode
        `"stored"` for the same numbers from ordinary autograd, `"reversible"`, or `"auto"`, which
        is `"reversible"` in training and `"stored"` in evaluation. May be changed.
    drop_path
        Probability in [0, 1) that a sample skips F, and G, in training; one for all blocks, or one
        for each.
    tied_drop_path, buffer_after, stream_dtype
        As for `multibn.torch_backend.reversible.reversible`, which lists the errors, too.

    Raises
    ------
    TypeError, ValueError
        If an option is not valid.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch_backend.reversible import ReversibleSequence
    >>> model = ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])
    >>> y1, y2 = model(torch.randn(2, 8), torch.randn(2, 8))
    >>> (y1 + y2).sum().backward()  # stores the outputs alone
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        mode: Mode = "auto",
        drop_path: float | Sequence[float] = 0.0,
        tied_drop_path: bool = False,
        buffer_after: Sequence[int] = (),
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, Mode)
        self.layers = nn.ModuleList(nn.ModuleDict({"F": f, "G": g}) for f, g in blocks)
        count = len(self.layers)
        self.mode: Mode = mode
        self.drop_path = list(drop_path) if isinstance(drop_path, Sequence) else [drop_path] * count
        engine.check_options(count, self.drop_path, buffer_after, stream_dtype)
        self.tied_drop_path = tied_drop_path
        self.buffer_after = tuple(buffer_after)
        self.stream_dtype = stream_dtype

    def forward(self, x1: Tensor, x2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """The streams after the last block; every F and G gets `cond`."""
        return engine.reversible(
            self._blocks(),
            x1,
            x2,
            *cond,
            mode=self.mode,
            drop_path=self.drop_path,
            tied_drop_path=self.tied_drop_path,
            buffer_after=self.buffer_after,
            stream_dtype=self.stream_dtype,
        )

    def inverse(self, y1: Tensor, y2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Inputs of `forward` from its outputs, as `reversible.inverse` computes and raises."""
        return engine.inverse(self._blocks(), y1, y2, *cond, stream_dtype=self.stream_dtype)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, drop_path={self.drop_path}, buffer_after={self.buffer_after}"

    def _blocks(self) -> list[Block]:
        return [(layer["F"], layer["G"]) for layer in self.layers]  # type: ignore[index]
