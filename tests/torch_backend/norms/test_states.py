"""The states of other normalizers, and the example, as docs/guides/who-shares-what.md has them."""

from typing import Any

import numpy as np
import pytest
import torch

from multibn.torch_backend import RunningNorm
from tests.helpers import launch

NEEDS = "torch gymnasium"


def test_the_statistics_of_a_gymnasium_wrapper_load() -> None:
    import gymnasium

    env: Any = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    env.reset(seed=0)
    for _ in range(30):
        _, _, ended, _, _ = env.step(env.action_space.sample())
        if ended:
            env.reset()
    rms = env.obs_rms
    norm = RunningNorm(4)
    names = "mean", "var", "count"
    norm.load_state_dict({k: torch.tensor(getattr(rms, k), dtype=torch.float64) for k in names})
    x = np.random.default_rng(0).normal(size=(3, 4))
    mean, var = (v.astype(np.float64) for v in (rms.mean, rms.var))
    right = (x - mean) / np.sqrt(var + 1e-8)
    np.testing.assert_allclose(norm(torch.tensor(x)).numpy(), right, rtol=1e-12)
    assert float(norm.get_buffer("count")) == float(rms.count)


@pytest.mark.launches
def test_the_example_trains_with_and_without_sharing() -> None:
    output = launch.run("torchrun", 2, "examples/observations.py", "--rollouts", "1").stdout
    assert "one normalizer of all ranks: return of rank 0 " in output
    assert "a normalizer for each rank: return of rank 0 " in output
