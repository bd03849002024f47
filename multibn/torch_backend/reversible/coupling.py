"""Autograd function that saves no activations of a residual branch and recomputes the branch.

Importing this module imports torch's compiler, which takes seconds.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from multibn.torch_backend.reversible.residual_branch import ResidualBranch

_REASON = (
    "reversible blocks cannot be part of a compiled graph. Compile without fullgraph=True, compile "
    'F and G instead, or set `mode="stored"`.'
)


@torch.compiler.disable(reason=_REASON)
def run_recomputed(
    branches: Iterable[ResidualBranch], streams: list[Tensor], cond: Sequence[Any]
) -> None:
    """Run `branches` and replace `streams` by the outputs; autograd saves only the outputs.

    torch.compile skips this function: a graph for each branch and each pass would take minutes.
    """
    run = Run()
    for branch in branches:
        stream, x = streams[branch.target], streams[1 - branch.target]
        y = _AddBranch.apply(run, branch, stream, x, *cond, *branch.parameters)
        if y.requires_grad and run.first is None:
            run.first = len(run.branches) - 1
        streams[branch.target] = y
    streams[:] = _SaveStreams.apply(run, *streams, *cond)


class Run:
    """One call of `run_recomputed`: its branches and, during the backward pass, the streams.

    Between forward and backward, only `_SaveStreams` has the streams and the tensors of `cond`. It
    uses save_for_backward, so that autograd checks and frees these tensors.
    """

    def __init__(self) -> None:
        self.branches: list[ResidualBranch] = []
        self.first: int | None = None  # index of the first branch that gets a gradient

    def begin_backward(self, streams: list[Tensor], cond: list[Any]) -> None:
        """Keep the streams after the last branch; `gradients` undoes the branches one by one."""
        self._position, self.streams, self.cond = len(self.branches), streams, cond

    def end_backward(self) -> None:
        """Free the streams and the tensors of `cond`."""
        del self.streams, self.cond

    def gradients(self, index: int, dy: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Undo branch `index`. Return the gradients of its input, `cond` and its parameters.

        `dy` is the gradient of the stream after the branch; `needed` selects gradients to compute.
        """
        while self._position > index + 1:
            branch = self.branches[self._position - 1]
            stream, x = self.streams[branch.target], self.streams[1 - branch.target]
            with torch.no_grad(), branch.replaying():
                self._undo(branch, branch(stream, x, self.cond))
        branch = self.branches[index]
        stream, x = self.streams[branch.target], self.streams[1 - branch.target]
        # Detached copies that share memory: hooks on the parameters themselves would run here, and
        # again when autograd has summed the gradients.
        inputs = [
            t.detach().requires_grad_(need) if isinstance(t, Tensor) else t
            for t, need in zip((x, *self.cond, *branch.parameters), needed, strict=True)
        ]
        end_of_cond = 1 + len(self.cond)
        with torch.enable_grad(), branch.replaying(inputs[end_of_cond:]):
            # A view, because torch's FlopCounterMode cannot hook a leaf of autograd.grad.
            residual = branch(stream, inputs[0].view_as(inputs[0]), inputs[1:end_of_cond])
        _check_leaves(branch, residual, inputs)
        outputs = [get_gradient_edge(residual)] if residual.requires_grad else []
        if index != self.first:
            self._undo(branch, residual.detach())
        del stream, x, residual  # memory is at its peak in the next lines
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need and outputs]
        grads = iter(torch.autograd.grad(outputs, wanted, dy, allow_unused=True) if wanted else ())
        return [next(grads, None) if need else None for need in needed]

    def _undo(self, branch: ResidualBranch, residual: Tensor) -> None:
        self.streams[branch.target] = self.streams[branch.target] - residual
        self._position -= 1


class _AddBranch(torch.autograd.Function):
    """Add a branch's output to its stream; saves no tensor."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, branch: ResidualBranch, stream: Tensor, x: Tensor, *arguments: Any
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.index = run, len(run.branches)
        read = (x, *arguments[: len(arguments) - len(branch.parameters)])
        inputs = [t.detach() if isinstance(t, Tensor) else t for t in read]
        with branch.recording([t for t in inputs if isinstance(t, Tensor)]):
            residual = branch(stream, inputs[0], inputs[1:])
        run.branches.append(branch)
        return stream + residual

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        if torch.is_grad_enabled():
            raise RuntimeError(
                "reversible blocks cannot be differentiated twice: got `create_graph=True`. Set "
                '`mode="stored"`, or set `mode="auto"` and call eval() before the forward pass.'
            )
        needed = ctx.needs_input_grad[3:]
        gradients: list[Tensor | None] = [None] * len(needed)
        if dy is not None and any(needed):
            gradients = ctx.run.gradients(ctx.index, dy, needed)
        if ctx.index == ctx.run.first:  # earlier branches need no gradients
            ctx.run.end_backward()
        return None, None, dy, *gradients


class _SaveStreams(torch.autograd.Function):
    """Identity that saves the streams."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, first: Tensor, second: Tensor, *cond: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tensors = [c if isinstance(c, Tensor) else None for c in cond]
        ctx.run, ctx.cond = run, [None if isinstance(c, Tensor) else c for c in cond]
        ctx.save_for_backward(first, second, *tensors)
        return first, second

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second, *tensors = ctx.saved_tensors
        cond = [c if t is None else t for t, c in zip(tensors, ctx.cond, strict=True)]
        ctx.run.begin_backward([first, second], cond)
        return None, *grad_outputs, *[None] * len(cond)


def _check_leaves(branch: ResidualBranch, residual: Tensor, inputs: Sequence[Any]) -> None:
    """Raise if `residual` has leaves other than `inputs`: their gradients would be lost."""
    allowed = {id(t) for t in inputs}
    visited: set[Any] = set()
    nodes: list[Any] = [residual.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in allowed:
            raise RuntimeError(
                f"{branch} reads a tensor of shape {tuple(node.variable.shape)} that needs a "
                "gradient and is neither among its parameters nor in `cond`. Pass it in `cond`."
            )
        nodes += [following for following, _ in node.next_functions]
