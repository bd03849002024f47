"""Copies of the buffers that a layer reads; a recomputation gets those of the first pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multibn.engine import recompute
from multibn.engine.statistics import BatchStatistics
from multibn.torch_backend.layer import autograd, compiled


def read_once(x: Tensor, mean: Tensor, var: Tensor, *others: Tensor) -> Sequence[Tensor]:
    """Return copies of the running statistics and two other tensors, for a pass over `x`.

    In a recomputation, return the copies of the first pass.
    """
    if compiled.is_compiling_or_fake(x):
        copies: list[Tensor] = torch.ops.multibn.read_once([mean, var, *others])
        return copies
    kept = recompute.replayed(tuple(mean.shape))
    if kept is None:
        with autograd.disable_dispatch_modes_in_recompute():
            kept = BatchStatistics(*(v.clone() for v in (mean, var, *others)))
        recompute.record(kept)
    return kept


@compiled.operator(
    "copies(Tensor[] read, Tensor? after) -> Tensor[]",
    lambda read, _: [torch.empty_like(v) for v in read],
)
def _copies(read: list[Tensor], after: Any) -> list[Tensor]:
    return [v.clone() for v in read]


@compiled.operator("read_once(Tensor[] read) -> Tensor[]")
def _read_once(read: list[Tensor]) -> Any:
    return compiled._call(torch.ops.multibn.copies, read, runs_again=False)
