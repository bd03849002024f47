"""Half a block: a function of one stream, whose result the other stream adds."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


class Half:
    """F or G of one block in one call.

    `into` is the index of the stream that is added to, `seen` the dtype of the module's input, and
    `scale` multiplies each sample's result (stochastic depth).
    """

    def __init__(
        self, block: int, into: int, module: nn.Module, seen: torch.dtype, scale: Tensor | None
    ) -> None:
        self.block, self.into, self.module = block, into, module
        self.seen, self.scale = seen, scale

    @cached_property
    def parts(self) -> list[nn.Module]:
        """The module and all modules in it."""
        return list(self.module.modules())

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Parameters of the module, each once."""
        return list({id(p): p for *_, p in self._places}.values())

    @cached_property
    def _places(self) -> list[tuple[Any, str, nn.Parameter]]:
        return [
            (part._parameters, name, parameter)
            for part in self.parts
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]

    def __str__(self) -> str:
        return f"{'FG'[self.into]} of block {self.block}"

    def __call__(self, here: Tensor, there: Tensor, cond: Sequence[Any]) -> Tensor:
        """The function of stream `there` that stream `here` adds."""
        added: Tensor = self.module(there.to(self.seen), *cond)
        if added.shape != here.shape:
            raise ValueError(
                f"{self} must return the shape of stream {self.into + 1}, {tuple(here.shape)}: "
                f"got {tuple(added.shape)}."
            )
        added = added.to(here.dtype)
        if self.scale is None:
            return added
        return added * self.scale.view(-1, *[1] * (here.ndim - 1))

    @contextlib.contextmanager
    def with_parameters(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Replace `self.parameters`, as torch.func.functional_call would in much more time."""
        others = {id(p): other for p, other in zip(self.parameters, parameters, strict=True)}
        before = [values[name] for values, name, _ in self._places]
        try:
            for values, name, parameter in self._places:
                values[name] = others[id(parameter)]
            yield
        finally:
            for (values, name, _), previous in zip(self._places, before, strict=True):
                values[name] = previous


def tensors(cond: Sequence[Any]) -> list[Tensor]:
    """The tensors among the modules' further arguments."""
    return [c for c in cond if isinstance(c, Tensor)]
