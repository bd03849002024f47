"""Activation checkpointing that updates and communicates batch statistics once.

torch.utils.checkpoint runs a block again in the backward pass. A batch norm inside would update
its running statistics, and communicate, a second time (pytorch/pytorch#96136). Here the second pass
replays the statistics of the first.
"""

from contextlib import AbstractContextManager
from typing import Any

from multibn.engine import recompute


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first pass and of its recomputation, for torch.utils.checkpoint.

    `checkpoint(function, x, use_reentrant=False, context_fn=checkpoint_contexts)` gives the numbers
    of `function(x)` bit for bit. Layers of multibn inside update their running statistics once, and
    communicate once forward and once backward. torch's batch norms do so twice, and so do all
    layers with `use_reentrant=True`, for which torch takes no contexts.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts
    >>> layer = SyncBatchNorm(2)
    >>> x = torch.randn(4, 2, requires_grad=True)
    >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    >>> y.sum().backward()
    >>> layer.num_batches_tracked
    tensor(1)
    """
    first = recompute.recording()
    return first, recompute.replaying(first.tape)
