"""Masks in reversible blocks over ranks: the padded batch is the batch without padding."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multibn import SingleProcess
from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from multibn.torch_backend.reversible import ReversibleSequence
from tests.harness.runs import on

RUNS = on("torchrun mpiexec", 2, needs="torch")


BLOCKS, C, L = 3, 4, 6
MODES: Any = ("stored", "reversible")


def _batches(size: int) -> list[tuple[Any, Any]]:
    """Of each rank: both streams, shape (2, N, C, L), and a mask. One sample is all padding."""
    rng = np.random.default_rng(0)
    lengths = [[4, 0, 6], [1, 5], *[[2, 3]] * size][:size]
    return [
        (rng.normal(1, 1, (2, len(n), C, L)), np.arange(L) < np.array(n)[:, None]) for n in lengths
    ]


def _elements(xs: Any, mask: Any) -> Any:
    """Those that count, shape (2, elements, C)."""
    return xs.swapaxes(2, 3)[:, mask]


class _Masked(nn.Module):
    def __init__(self, communicator: Any) -> None:
        super().__init__()
        self.norm = SyncBatchNorm(C, process_group=communicator)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.norm(x, mask=mask).tanh()


def _step(communicator: Any, xs: Any, mask: Any, mode: Any) -> tuple[Any, Any, Any]:
    model = ReversibleSequence(
        [(_Masked(communicator), _Masked(communicator)) for _ in range(BLOCKS)], mode=mode
    ).double()
    streams = [torch.from_numpy(x).requires_grad_() for x in xs]
    m = None if mask is None else torch.from_numpy(mask)
    y1, y2 = model(*streams, m)
    loss = y1.sin() * y2
    (loss if m is None else torch.where(m[:, None], loss, 0.0)).sum().backward()
    dx = np.stack([x.grad.numpy() for x in streams if x.grad is not None])
    parameters = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
    averages = [b.double().numpy() for b in model.buffers()]
    return dx, np.concatenate(parameters), np.concatenate([a.reshape(-1) for a in averages])


def check_the_padded_batch_is_the_batch_without_padding(world: Communicator) -> None:
    batches = _batches(world.size)
    xs, mask = batches[world.rank]
    whole = np.concatenate([_elements(*batch) for batch in batches], axis=1)
    expected = _step(SingleProcess(), whole, None, "stored")
    ends = np.cumsum([0, *(int(m.sum()) for _, m in batches)])
    mine = expected[0][:, ends[world.rank] : ends[world.rank + 1]]
    for mode in MODES:
        dx, dparameters, averages = _step(world, np.where(mask[:, None], xs, 1e6), mask, mode)
        np.testing.assert_allclose(_elements(dx, mask), mine, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(world.allreduce(dparameters), expected[1], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(averages, expected[2], rtol=1e-9, atol=1e-9)
