"""A step, a call that a checkpoint runs again, and a file, for the tests of this room."""

import io
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multibn.torch_backend import checkpoint_contexts

checkpointed: Any = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)


def step(run: Any, x: Tensor, dy: Tensor, parameters: Iterable[Tensor] | None = None) -> list[Any]:
    """The output, and the gradients of the input and of parameters, by default all of `run`.

    The input has the strides of `x`. A gradient is None where the output does not depend on it.
    """
    parameters = run.parameters() if parameters is None else parameters
    inputs = [x.detach().requires_grad_(), *parameters]
    y = run(inputs[0])
    return [y.detach(), *torch.autograd.grad(y, inputs, dy, allow_unused=True)]


def saved(model: Any) -> Any:
    """The model as it comes back from a file."""
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)
