"""A long training with ranks that are late, empty or recompute, now and then: exact to the end."""

import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts
from multibn.torch_backend import check_sync as expect_in_sync  # not a check of its own
from tests.harness.runs import on

RUNS = on("mpiexec", 2, needs="torch")


STEPS, FEATURES = 1000, 3


def _batches(rng: np.random.Generator, size: int, unlucky: int, how: str) -> list[torch.Tensor]:
    counts = rng.integers(2, 5, size)
    if how == "empty":
        counts[unlucky] = 0
    scale = rng.uniform(0.5, 2.0, size)
    return [torch.from_numpy(rng.normal(r, s, (n, FEATURES)))
            for r, (n, s) in enumerate(zip(counts, scale, strict=True))]  # fmt: skip


def check_a_thousand_steps_with_trouble_stay_exact(world: Communicator) -> None:
    """Buffers equal on all ranks to the last bit, and those of one process with all the data."""
    layer = SyncBatchNorm(FEATURES, process_group=world, dtype=torch.float64)
    oracle = nn.BatchNorm1d(FEATURES, dtype=torch.float64)
    rng = np.random.default_rng(0)  # the same on all ranks
    farthest = 0.0
    for step in range(STEPS):
        how = ("late", "empty", "checkpointed")[rng.integers(3)]
        unlucky = int(rng.integers(world.size))
        batches = _batches(rng, world.size, unlucky, how)
        if how == "late" and world.rank == unlucky and step % 10 == 0:
            time.sleep(0.003)
        x = batches[world.rank].requires_grad_()
        if how == "checkpointed" and world.rank == unlucky:
            y: Any = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
        else:
            y = layer(x)
        (y**3).sum().backward()
        whole = torch.cat([b.detach() for b in batches]).requires_grad_()
        (oracle(whole) ** 3).sum().backward()
        assert whole.grad is not None
        assert x.grad is not None
        start = sum(len(b) for b in batches[: world.rank])
        error = (x.grad - whole.grad[start : start + len(x)]).abs().max() if len(x) else 0.0
        farthest = max(farthest, float(error))
    found = {name: b.numpy() for name, b in layer.named_buffers()}
    expect_in_sync(layer, world)
    for name, expected in oracle.named_buffers():
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-12, atol=1e-12)
    assert farthest < 1e-9
