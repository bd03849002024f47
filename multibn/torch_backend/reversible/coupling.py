"""Autograd function for one residual branch: saves no activations, and runs again in backward.

Importing this module imports torch's compiler, which takes seconds.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from multibn.torch_backend.reversible.half_block import ResidualBranch

_REASON = (
    "reversible blocks cannot be part of a compiled graph. Compile without fullgraph=True, compile "
    'F and G instead, or set `mode="stored"`.'
)


@torch.compiler.disable(reason=_REASON)
def run_recomputed(
    halves: Iterable[ResidualBranch], streams: list[Tensor], cond: Sequence[Any]
) -> None:
    """Run `halves` on `streams`, in place, and store the streams at the end only.

    torch.compile must not look inside: a graph for each half and each pass would take minutes.
    """
    run = Run()
    for half in halves:
        here, there = streams[half.target], streams[1 - half.target]
        y = _Couple.apply(run, half, here, there, *cond, *half.parameters)
        if y.requires_grad and run.first is None:
            run.first = len(run.halves) - 1
        streams[half.target] = y
    streams[:] = _SaveStreams.apply(run, *streams, *cond)


class Run:
    """One call of `run_recomputed`: its halves, and in the backward pass the present streams.

    Between forward and backward only `_SaveStreams` holds streams and the tensors of `cond`, by
    save_for_backward: autograd checks and frees them.
    """

    def __init__(self) -> None:
        self.halves: list[ResidualBranch] = []
        self.first: int | None = None  # index of the first half that gets a gradient
        self.restore([], [])

    def restore(self, streams: list[Tensor], cond: list[Any]) -> None:
        """Start from the streams after all halves, or drop them."""
        self._position, self.streams, self.cond = len(self.halves), streams, cond

    def gradients(self, index: int, dy: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of half `index`, for its stream, `cond` and parameters; then undo the half.

        `dy` is the gradient of the stream after the half, `needed` says which gradients to compute.
        """
        while self._position > index + 1:
            half = self.halves[self._position - 1]
            here, there = self.streams[half.target], self.streams[1 - half.target]
            with torch.no_grad(), half.replaying():
                self._undo(half, half(here, there, self.cond))
        half = self.halves[index]
        here, there = self.streams[half.target], self.streams[1 - half.target]
        # Aliases of the parameters: the user's hooks on the parameters would run here, and a second
        # time when autograd has summed the gradients.
        inputs = [
            t.detach().requires_grad_(need) if isinstance(t, Tensor) else t
            for t, need in zip((there, *self.cond, *half.parameters), needed, strict=True)
        ]
        count = 1 + len(self.cond)
        with torch.enable_grad(), half.replaying(inputs[count:]):
            # A view: torch's FlopCounterMode, for one, cannot hook a leaf of autograd.grad.
            added = half(here, inputs[0].view_as(inputs[0]), inputs[1:count])
        _refuse_foreign(half, added, inputs)
        ends = [get_gradient_edge(added)] if added.requires_grad else []
        if index != self.first:
            self._undo(half, added.detach())
        del here, there, added  # memory is at its peak in the next lines
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need and ends]
        grads = iter(torch.autograd.grad(ends, wanted, dy, allow_unused=True) if wanted else ())
        return [next(grads, None) if need else None for need in needed]

    def _undo(self, half: ResidualBranch, added: Tensor) -> None:
        self.streams[half.target] = self.streams[half.target] - added
        self._position -= 1


class _Couple(torch.autograd.Function):
    """A stream plus half a block's result; saves no tensor."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, half: ResidualBranch, here: Tensor, there: Tensor, *others: Any
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.index = run, len(run.halves)
        given = (there, *others[: len(others) - len(half.parameters)])
        inputs = [t.detach() if isinstance(t, Tensor) else t for t in given]
        with half.recording([t for t in inputs if isinstance(t, Tensor)]):
            added = half(here, inputs[0], inputs[1:])
        run.halves.append(half)
        return here + added

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        if torch.is_grad_enabled():
            raise RuntimeError(
                "reversible blocks cannot be differentiated twice, which `create_graph=True` asks "
                'for. Use `mode="stored"`, or `mode="auto"` in evaluation.'
            )
        needed = ctx.needs_input_grad[3:]
        gradients: list[Tensor | None] = [None] * len(needed)
        if dy is not None and any(needed):
            gradients = ctx.run.gradients(ctx.index, dy, needed)
        if ctx.index == ctx.run.first:  # no half before it needs a gradient, nor the streams
            ctx.run.restore([], [])
        return None, None, dy, *gradients


class _SaveStreams(torch.autograd.Function):
    """Identity that saves the streams."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, first: Tensor, second: Tensor, *cond: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tensors = [c if isinstance(c, Tensor) else None for c in cond]
        ctx.run, ctx.others = run, [None if isinstance(c, Tensor) else c for c in cond]
        ctx.save_for_backward(first, second, *tensors)
        return first, second

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second, *tensors = ctx.saved_tensors
        cond = [c if t is None else t for t, c in zip(tensors, ctx.others, strict=True)]
        ctx.run.restore([first, second], cond)
        return None, *grad_outputs, *[None] * len(cond)


def _refuse_foreign(half: ResidualBranch, added: Tensor, inputs: Sequence[Any]) -> None:
    """Raise if `added` depends on leaves other than `inputs`, whose gradients would be lost."""
    own = {id(t) for t in inputs}
    seen: set[Any] = set()
    waiting: list[Any] = [added.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in own:
            raise RuntimeError(
                f"{half} reads a tensor of shape {tuple(node.variable.shape)} that needs a "
                "gradient and is neither among its parameters nor in `cond`. Pass it in `cond`."
            )
        waiting += [following for following, _ in node.next_functions]
