"""RunningNorm in one process, and the example and states of docs/guides/who-shares-what.md."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multibn import SingleProcess
from multibn.torch_backend import RunningNorm
from tests.helpers import launch, require

NEEDS = "torch"


def filled(shape: Any = (2,), **options: Any) -> tuple[Any, Tensor]:
    norm = RunningNorm(shape, process_group=SingleProcess(), **options)
    x = torch.randn(7, 3, *norm.shape, generator=torch.Generator().manual_seed(0)).double() * 3 + 5
    norm.update(x)
    norm.synchronize()
    return norm, x


@pytest.mark.parametrize("shape", [(), (2,), (2, 4)], ids=str)
def test_outputs_are_normalized_clipped_and_inverted(shape: Any) -> None:
    norm, x = filled(shape, eps=0.1)
    y = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 0.1).sqrt()
    torch.testing.assert_close(norm(x), y)
    torch.testing.assert_close(norm.inverse(norm.normalize(x)), x)
    torch.testing.assert_close(torch.compile(norm, backend="eager", fullgraph=True)(x[0]), y[0])
    clipped, _ = filled(shape, eps=0.1, clip=0.5)
    torch.testing.assert_close(clipped(x), y.clamp(-0.5, 0.5))
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.05)):
        found = norm(x.to(dtype).requires_grad_())
        assert (found.dtype, found.requires_grad) == (dtype, True)
        torch.testing.assert_close(found.double(), y, rtol=bound, atol=bound)
    assert norm(x.int()).dtype == torch.float32


def test_nothing_counts_twice() -> None:
    norm, x = filled()
    state = copy.deepcopy(norm.state_dict())
    norm.synchronize()
    norm.update(x)
    norm.load_state_dict(state)  # what is new is not of this history
    norm.synchronize()
    norm.freeze()
    norm.update(x)
    norm.synchronize()
    norm.update(x[:0])
    norm.update(x, mask=torch.zeros(7, 3, dtype=torch.bool))
    torch.testing.assert_close(norm.state_dict(), state, rtol=0, atol=0)
    norm.freeze(False)
    norm.update(x[0, 0])
    norm.synchronize()
    assert norm.count == 22


def test_statistics_stay_wide() -> None:
    norm, _ = filled()
    mean = norm.mean.clone()
    for change in (norm.half, norm.float, lambda: norm.to("cpu", torch.bfloat16)):
        change()
        torch.testing.assert_close(norm.mean, mean, rtol=0, atol=0)
    assert norm.to("meta").mean.is_meta


def test_wrong_arguments_are_named() -> None:
    norm, _ = filled()
    for wrong, got in ((torch.ones(3), r"Tensor of shape \(3,\)"), (np.ones(2), "ndarray of")):
        with pytest.raises(ValueError, match=rf"`x` must be .*\(\*batch, \*\(2,\)\): got {got}"):
            norm.update(wrong)
    with pytest.raises(ValueError, match="`mask` must have the shape of the input"):
        norm.update(torch.ones(3, 2), mask=torch.ones(2, dtype=torch.bool))


def test_the_statistics_of_a_gymnasium_wrapper_load() -> None:
    require.need("gymnasium")
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
    require.need("gymnasium")
    output = launch.run("torchrun", 2, "examples/observations.py", "--rollouts", "1").stdout
    assert "one normalizer of all ranks: return of rank 0 " in output
    assert "a normalizer for each rank: return of rank 0 " in output
