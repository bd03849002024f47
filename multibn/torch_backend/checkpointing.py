"""Activation checkpointing that updates and communicates batch statistics once.

torch.utils.checkpoint runs a block a second time in the backward pass, and a batch norm inside
updates its running statistics, and communicates, again (pytorch/pytorch#96136). Here the second
pass replays the statistics of the first.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from multibn import recompute

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first pass and of its recomputation, for torch.utils.checkpoint.

    `checkpoint(function, x, use_reentrant=False, context_fn=checkpoint_contexts)` gives the numbers
    of `function(x)` bit for bit. Layers of multibn communicate once forward and once backward and
    update their running statistics once. Other batch norms inside update theirs once, too; those
    that communicate do so again.
    """
    first = recompute.recording()
    return first, _Recomputation(first.tape)


def recomputed(function: Callable[P, R]) -> Callable[P, R]:
    """`function` for one call of torch.utils.checkpoint with `use_reentrant=True`.

    `checkpoint(recomputed(function), x, use_reentrant=True)` is to the reentrant variant, which
    takes no contexts, what `checkpoint_contexts` is to the other. The first call of the result is
    the first pass, all others run it again: make a new one for each call of checkpoint.
    """
    first, again = checkpoint_contexts()
    contexts = [first]

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with contexts.pop() if contexts else again:
            return function(*args, **kwargs)

    return run


class _Recomputation:
    """Replays a tape, and holds the buffers of norms that know nothing of it."""

    def __init__(self, tape: recompute.Tape) -> None:
        self._replay = recompute.replaying(tape)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()  # other threads' modules pass the hook, too
        self._held: dict[Tensor, Tensor] = {}
        self._replay.__enter__()
        self._hook = register_module_forward_pre_hook(self._hold)

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        for buffer, before in self._held.items():
            # By .data: torch's batch norm saves its buffers for the backward pass, and this writes
            # the values that they had then.
            buffer.data.copy_(before)
        self._replay.__exit__(*exception)  # may raise

    def _hold(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, _NormBase) and threading.get_ident() == self._thread:
            for buffer in module.buffers(recurse=False):
                self._held.setdefault(buffer, buffer.detach().clone())
