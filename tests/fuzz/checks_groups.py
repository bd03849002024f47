"""Functional calls whose options change, and groups that come and go, made up at random.

MULTIBN_FUZZ says how many, see `calls`.
"""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from multibn import Communicator
from multibn.engine.masks import WEIGHTINGS
from multibn.parity import oracle
from multibn.torch_backend import SyncBatchNorm, sync_batch_norm
from tests.fuzz.calls import CALLS
from tests.harness.runs import on

RUNS = on("torchrun mpiexec", 2, 3, needs="torch")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "eps": (1e-5, 1e-3, 10.0),
    "weighting": tuple(WEIGHTINGS),
    "nonfinite": (None, "raise", "skip"),
}


def check_a_function_whose_options_change_is_right_or_an_error(world: Communicator) -> None:
    for seed in range(max(CALLS // 30, 5)):
        rng = np.random.default_rng(seed)
        for call in range(8):
            C = int(rng.integers(1, 4))
            xs = [rng.standard_normal((n, C)) for n in rng.integers(0, 4, world.size)]
            xs[0] = rng.standard_normal((3, C))
            mine = {name: values[rng.integers(len(values))] for name, values in OPTIONS.items()}
            name, other_rank = rng.choice([*OPTIONS]), rng.integers(world.size)
            others = [value for value in OPTIONS[name] if value != mine[name]]
            x = torch.from_numpy(xs[world.rank])
            if rng.random() < 0.3:
                other = mine | {name: others[rng.integers(len(others))]}
                with pytest.raises(ValueError, match=f"differently: .*{name}="):
                    sync_batch_norm(
                        x, process_group=world, **other if world.rank == other_rank else mine
                    )
                continue
            y, batch = sync_batch_norm(x, process_group=world, **mine)
            shape: Any = {"eps": mine["eps"], "weighting": mine["weighting"]}
            want = oracle.batch_norm(xs, xs, np.ones(C), np.zeros(C), **shape)
            np.testing.assert_allclose(y, want.y[world.rank], atol=1e-9, err_msg=f"{seed} {call}")
            np.testing.assert_allclose(batch.var, want.var, atol=1e-12)


def check_groups_that_come_and_go_leave_nothing_behind(world: Communicator) -> None:
    kept: list[Any] = []
    for seed in range(max(CALLS // 30, 5)):
        rng = np.random.default_rng(seed)
        colors = rng.integers(0, 2, world.size)
        part = world.split(int(colors[world.rank]))
        for color in rng.permutation(2)[: rng.integers(1, 3)]:
            num_steps = rng.integers(0, 3)
            if colors[world.rank] == color:
                layer = SyncBatchNorm(2, process_group=part)
                for _ in range(num_steps):
                    layer(torch.randn(4, 2))
                del layer
            if rng.random() < 0.3:  # on all ranks
                kept.append(SyncBatchNorm(2, process_group=world))
        if rng.random() < 0.5:
            gc.collect()
        everyone = SyncBatchNorm(2, momentum=1.0, process_group=world)
        everyone(torch.full((4, 2), float(world.rank)) + torch.arange(4.0)[:, None])
        mean = (world.size - 1) / 2 + 1.5
        assert everyone.running_mean is not None
        assert everyone.running_mean.tolist() == [mean] * 2, seed
