"""Steps of several models of one architecture, made up at random: right, or an error on all ranks.

MULTIBN_FUZZ says how many, see `calls`.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from tests.fuzz.calls import CALLS
from tests.harness.runs import on

RUNS = on("torchrun mpiexec", 2, 3, needs="torch")


def _models(world: Communicator, rng: np.random.Generator) -> list[Any]:
    """Built, or copied from an earlier one; one rank may hold further copies for itself."""
    models: list[Any] = []
    for _ in range(rng.integers(2, 5)):
        original = int(rng.integers(-1, len(models)))
        if original < 0:
            models.append(SyncBatchNorm(2, momentum=1.0, process_group=world))
        else:
            models.append(copy.deepcopy(models[original]))
        if rng.random() < 0.3 and rng.integers(world.size) == world.rank:
            models[-1].kept = [copy.deepcopy(models[-1])]
    return models


def _step(models: Sequence[Any], order: Sequence[int], offset: int) -> None:
    for n in order:
        x = torch.full((4, 2), float(10 * n + offset)) + torch.arange(4.0)[:, None]
        models[n](x.requires_grad_()).square().sum().backward()


def check_models_of_one_architecture_keep_their_messages_apart(world: Communicator) -> None:
    for seed in range(max(CALLS // 50, 5)):
        rng = np.random.default_rng(seed)
        models = _models(world, rng)
        orders = [*itertools.permutations(range(len(models)))]
        wrong_step, wrong_rank = rng.integers(6), rng.integers(world.size)
        for step in range(3):
            mine, other = (orders[n] for n in rng.choice(len(orders), 2, replace=False))
            if step == wrong_step == 0:
                break  # layers of one name are told apart from then on: docs/guides/when-it-fails
            copied, copying_rank = rng.integers(len(models)), rng.integers(world.size)
            if world.rank == copying_rank:  # and goes on with the copy
                models[copied] = copy.deepcopy(models[copied])
            if step == wrong_step:
                with pytest.raises(RuntimeError, match="the ranks are in different"):
                    _step(models, other if world.rank == wrong_rank else mine, step)
                break
            _step(models, mine, step)
            found = [float(model.running_mean[0]) for model in models]
            assert found == [10 * n + step + 1.5 for n in range(len(models))], seed
