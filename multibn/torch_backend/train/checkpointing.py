"""Activation checkpointing that updates and communicates batch statistics once.

torch.utils.checkpoint runs a block again in the backward pass. A batch norm inside would update
its running statistics, and communicate, a second time (pytorch/pytorch#96136). Here the second pass
replays the statistics of the first.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from multibn.engine import recompute
from multibn.torch_backend.layer.autograd import disable_dispatch_modes_in_recompute
from multibn.torch_backend.layer.base import running_tensors
from multibn.torch_backend.layer.sub_batch_norm import SubBatchNormPart


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for torch.utils.checkpoint's `context_fn`, so that each batch counts once.

    `checkpoint(function, x, use_reentrant=False, context_fn=checkpoint_contexts)` returns the same
    as `function(x)`, bit for bit. All batch norms inside update their running statistics once.
    Layers of multibn communicate once forward and once backward; nn.SyncBatchNorm communicates
    again in the recomputation. torch rejects `context_fn` with `use_reentrant=True`, where all
    layers update and communicate twice.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from multibn.torch import SyncBatchNorm, checkpoint_contexts
    >>> layer = SyncBatchNorm(2)
    >>> x = torch.randn(4, 2, requires_grad=True)
    >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    >>> y.sum().backward()
    >>> layer.num_batches_tracked
    tensor(1)
    """
    first = recompute.recording()
    return first, _Recomputation(first.tape)


class _Recomputation:
    """Replay a tape, and restore the buffers of batch norms that do not record on tapes."""

    def __init__(self, tape: recompute.Tape) -> None:
        self._replay = recompute.replaying(tape)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()  # the hook runs for modules of all threads
        self._before: dict[Tensor, Tensor] = {}
        self._replay.__enter__()
        self._hook = register_module_forward_pre_hook(self._copy_buffers)

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        with disable_dispatch_modes_in_recompute():
            for buffer, before in self._before.items():
                # `.data` keeps the version counter: autograd has saved the buffer with these
                # values, and a higher version would be an error in the backward pass.
                buffer.data.copy_(before)
        self._replay.__exit__(*exception)  # may raise

    def _copy_buffers(self, module: nn.Module, _: Any) -> None:
        # The statistics of a SubBatchNormPart are on the tape. torch.compile cannot trace
        # get_ident(): compiled code is assumed to run in this thread.
        if isinstance(module, SubBatchNormPart) or not isinstance(module, _NormBase):
            return
        if torch.compiler.is_compiling() or threading.get_ident() == self._thread:
            with disable_dispatch_modes_in_recompute():
                for buffer in (*module.buffers(recurse=False), *running_tensors(module)):
                    self._before.setdefault(buffer, buffer.detach().clone())
