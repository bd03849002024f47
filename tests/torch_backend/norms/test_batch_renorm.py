"""What batch renormalization shares with batch norm, and what it refuses."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn import SingleProcess
from multibn import torch_backend as tb
from tests.helpers.spread import OTHERS

NEEDS = "torch"


def test_a_state_of_batch_norm_loads_and_evaluates_alike() -> None:
    plain, layer = nn.BatchNorm2d(3), tb.SyncBatchRenorm2d(3, process_group=SingleProcess())
    x = torch.randn(4, 3, 5, 5)
    plain(x + 1)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))
    # Until the schedule begins, training is batch norm's, too.
    torch.testing.assert_close(layer.train()(x), plain.train()(x))


@pytest.mark.parametrize("rmax", [1.2, 3.0])
def test_a_schedule_without_a_start_renormalizes_the_first_batch(rmax: float) -> None:
    """The ratio of the deviations, each with eps in its variance, is clipped to [1/rmax, rmax]."""
    layer: Any = tb.SyncBatchRenorm1d(
        2, 0.1, rmax=rmax, dmax=0.4, schedule=(0, 0, 0), dtype=torch.float64, affine=False
    )
    layer.running_mean += 0.3
    layer.running_var *= 2
    x = torch.tensor([[1.0, -2.0], [2.0, 2.0], [3.0, 6.0]], dtype=torch.float64)
    mean, var = x.mean(0).numpy(), x.var(0, correction=0).numpy()
    std, running_std = np.sqrt(var + 0.1), np.sqrt(2.1)
    r = np.clip(std / running_std, 1 / rmax, rmax)
    d = np.clip((mean - 0.3) / running_std, -0.4, 0.4)
    np.testing.assert_allclose(layer(x), (x.numpy() - mean) / std * r + d, rtol=1e-12)


@pytest.mark.parametrize(
    "option, value",
    [
        (k, v)
        for k, values in OTHERS.items()
        for v in values
        if k not in ("fuse_relu", "num_splits")
    ],
)
def test_without_limits_training_normalizes_as_evaluation_does(option: str, value: Any) -> None:
    """r and d then exchange the batch's statistics for the running statistics of before."""
    options = {"rmax": 1e9, "dmax": 1e9, "schedule": (0, 0, 0), option: value}
    layer: Any = tb.SyncBatchRenorm1d(3, dtype=torch.float64, **options)
    xs = torch.randn(2, 16, 3, dtype=torch.float64) * torch.tensor([0.5, 1.0, 3.0])
    layer(xs[0])
    expected = copy.deepcopy(layer).eval()(xs[1])
    torch.testing.assert_close(layer(xs[1]), expected, msg=f"`{option}={value!r}` is ignored")


def test_it_neither_splits_nor_reverts() -> None:
    for convert in (lambda m: tb.convert_sub_batchnorm(m, 2), tb.revert_sync_batchnorm):
        with pytest.warns(UserWarning, match="it renormalizes its batch, which would be lost"):
            convert(nn.Sequential(tb.SyncBatchRenorm1d(2)))


def test_options_are_shown_and_checked() -> None:
    assert "rmax=2.0, schedule=(0, 0, 0)" in repr(
        tb.SyncBatchRenorm1d(2, rmax=2.0, schedule=(0, 0, 0))
    )


def test_limits_that_would_end_before_they_begin_rise_at_once() -> None:
    layers = [tb.SyncBatchRenorm1d(2, schedule=schedule) for schedule in ((2, 1, 0), (2, 2, 2))]
    for batch in range(4):
        x = 3 * torch.randn(8, 2) + batch
        early, at_once = (layer(x) for layer in layers)
        torch.testing.assert_close(early, at_once, rtol=0, atol=0)
