"""RunningNorm on ranks: one process's numbers, across restarts on other numbers of ranks."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multibn import torch_backend
from multibn.communicators import Communicator
from multibn.torch_backend import RunningNorm
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator

RUNS = on("torchrun mpiexec", 1, 2, 3, 4, needs="torch")

NUM_SAMPLES, NUM_BATCHES, SAVED_AFTER = 100_000, 300, 120
MEANS, STDS = np.array([0.0, 1.0, 50.0, -100.0, 3.0]), np.array([1.0, 1.0, 0.5, 1.0, 1e-3])
C = len(MEANS)


def _batches() -> list[np.ndarray[Any, Any]]:
    """Make uneven batches, some of them empty, whose mean drifts."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_SAMPLES, C)) * STDS + MEANS
    x[:, 0] += np.linspace(0, 3, NUM_SAMPLES)
    cuts = np.sort(generator.integers(0, NUM_SAMPLES, NUM_BATCHES - 3))
    return np.split(x, [*cuts, NUM_SAMPLES, NUM_SAMPLES])


def check_a_restart_on_other_ranks_is_one_process(world: Communicator) -> None:
    """Two ranks begin; after a restart, all go on. Masks leave out a part of the last batches."""
    batches = _batches()
    saved = Path(tempfile.gettempdir(), f"running-norm-{os.getppid()}.pt")
    first = world.split(int(world.rank < 2))
    sent: list[Any] = []
    seen: list[Any] = []
    for group, which in ((first, batches[:SAVED_AFTER]), (world, batches[SAVED_AFTER:])):
        counting = CountingCommunicator(group)
        norm: Any = RunningNorm(C, process_group=counting)
        if (seen and world.rank < 2) or group is world:
            norm.load_state_dict(torch.load(saved))
        for k, x in enumerate(which):
            kept = x[:, 1] > 0 if k % 5 == 4 else np.ones(len(x), bool)
            seen.append(x[kept])
            if (k * k) % group.size == group.rank:
                norm.update(torch.tensor(x), torch.tensor(kept) if k % 5 == 4 else None)
            if k % 7 == 6 or k == len(which) - 1:
                counting.take()
                norm.synchronize()
                sent.append(counting.take())
        if group is first and world.rank == 0:
            torch.save(norm.state_dict(), saved)
        world.allreduce(np.zeros(1))
    torch_backend.check_sync(norm, world)  # to the last bit
    if world.rank == 0:
        saved.unlink()
    exact = np.concatenate(seen).astype(np.longdouble)
    mean, var = exact.mean(0), exact.var(0)
    assert float(norm.count) == len(exact)
    errors = (
        abs(norm.mean.numpy() - mean) / (abs(mean) + np.sqrt(var)),
        abs(norm.var.numpy() / var - 1),
    )
    assert max(float(e.max()) for e in errors) < 1e-12, errors
    if world.size > 1:
        assert {tuple(messages) for messages in sent[1:]} == {(2 * C + 1,)}
        assert sent[0] == [C + 1, 2 * C + 1]


def check_what_differs_between_ranks_is_an_error_on_all(world: Communicator) -> None:
    last, wrong = world.rank == world.size - 1, f"\\[{world.size - 1}\\] of {world.size}"
    norm: Any = RunningNorm(2, process_group=world)
    norm.update(torch.tensor([[1.0, torch.nan if last else 2.0]]))
    where = rf"rank\(s\) {wrong}" if world.size > 1 else "this process"
    with pytest.raises(FloatingPointError, match=f"infinity or values that overflow on {where}"):
        norm.synchronize()
    norm.update(torch.ones(3, 2))
    norm.synchronize()
    assert float(norm.count) == 3 * world.size  # all is well
    if world.size == 1:
        return
    shape = RunningNorm(2 + last, process_group=world)
    with pytest.raises(RuntimeError, match=r"different places.*RunningNorm\(\(3,\), eps=1e-08"):
        shape.synchronize()
    if last:
        norm = RunningNorm(2, process_group=world)
    with pytest.raises(RuntimeError, match=rf"with count={3 * world.size}.*with count=0"):
        norm.synchronize()
