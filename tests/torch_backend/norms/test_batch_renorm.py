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
from tests.torch_backend.steps import step

NEEDS = "torch"


def test_a_state_of_batch_norm_loads_and_evaluates_alike() -> None:
    plain, layer = nn.BatchNorm2d(3), tb.SyncBatchRenorm2d(3, process_group=SingleProcess())
    x = torch.randn(4, 3, 5, 5)
    plain(x + 1)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))
    # Until the schedule begins, training is batch norm's, too.
    torch.testing.assert_close(layer.train()(x), plain.train()(x))


def _rise(n: int, start: int, end: int) -> float:
    return min(max((n - start + 1) / (end - start + 1), 0.0), 1.0)


@pytest.mark.parametrize("schedule", [(0, 0, 0), (2, 4, 5)])
@pytest.mark.parametrize("rmax", [1.3, 3.0])
def test_numbers_are_those_of_the_paper_while_the_limits_rise(rmax: float, schedule: Any) -> None:
    """The ratio of the deviations, each with eps in its variance, is clipped to [1/rmax, rmax]."""
    C, dmax, eps, momentum = 3, 0.4, 0.1, 0.3
    weight, bias = np.array([1.5, -0.5, 1.0]), np.array([0.5, 0.1, -1.0])
    layer: Any = tb.SyncBatchRenorm1d(
        C, eps, momentum, rmax=rmax, dmax=dmax, schedule=schedule, dtype=torch.float64
    )
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    mean, var = np.zeros(C), np.ones(C)
    data = np.random.default_rng(0).normal(size=(6, 2, 11, C)) * [0.5, 2.0, 1.0] + [0.3, -1.0, 0.0]
    for n, (x, dy) in enumerate(data):
        start, *ends = schedule
        rises = [_rise(n, start, end) for end in ends]
        limits = 1 + (rmax - 1) * rises[0], dmax * rises[1]
        m, v = x.mean(0), x.var(0)
        std, running_std = np.sqrt(v + eps), np.sqrt(var + eps)
        r = np.clip(std / running_std, 1 / limits[0], limits[0])
        d = np.clip((m - mean) / running_std, -limits[1], limits[1])
        xhat, g = (x - m) / std, dy * weight * r
        dx = (g - g.mean(0) - xhat * (g * xhat).mean(0)) / std
        renormed = xhat * r + d
        mean, var = mean + momentum * (m - mean), var + momentum * (v * 11 / 10 - var)
        found = [*step(layer, torch.tensor(x), torch.tensor(dy)), layer.running_mean]
        right = [renormed * weight + bias, dx, (dy * renormed).sum(0), dy.sum(0), mean, var]
        for got, want in zip([*found, layer.running_var], right, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


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
