"""The parts of a reversible MViT: norms of the last axis, positions, fusions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multibn.torch_backend import SubBatchNorm1d, SyncBatchNorm
from multibn.torch_backend.reversible import RevMViTConfig
from multibn.torch_backend.reversible.mvit.layers import (
    TwoStreamFusion,
    normalize_last_axis,
    relative_position_bias,
)
from multibn.torch_backend.reversible.mvit.model import resize_positions
from multibn.torch_backend.reversible.mvit.sizes import round_width

NEEDS = "torch"


@pytest.mark.parametrize(
    "width, multiplier, divisor, expected",
    [(96, 1.0, 1, 96), (96, 2.0, 8, 192), (10, 1.0, 4, 12), (9, 1.0, 4, 12), (13, 1.0, 4, 12)],
)
def test_widths_are_rounded_to_the_nearest_multiple_and_lose_a_tenth_at_most(
    width: int, multiplier: float, divisor: int, expected: int
) -> None:
    assert round_width(width, multiplier, divisor) == expected


@pytest.mark.parametrize("shape", [(6, 5), (6, 7, 5), (6, 2, 7, 5)])
@pytest.mark.parametrize(
    "make, splits",
    [(nn.BatchNorm1d, 1), (SyncBatchNorm, 1), (partial(SubBatchNorm1d, 2), 2)],
    ids=["torch", "synchronized", "sub"],
)
def test_batch_norms_normalize_the_last_axis(
    make: Callable, splits: int, shape: tuple[int, ...]
) -> None:
    x = 3 + 2 * torch.randn(shape, dtype=torch.float64)
    y = normalize_last_axis(make(5).double(), x)
    axes = tuple(range(len(shape) - 1))
    for k in range(splits):
        part = x[k::splits]
        expected = (part - part.mean(axes)) / (part.var(axes, correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(y[k::splits], expected, rtol=0, atol=1e-6)  # torch's is coarser


def test_relative_positions_are_resized_to_another_grid() -> None:
    table = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]  # distances of 3 positions
    q = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    bias = relative_position_bias(q, (1, 1, 6), (1, 1, 6), (None, None, table))
    assert (bias[0, 0].diff(dim=0) >= 0).all()
    assert bias.min() == -1
    assert bias.max() == 1


def test_positions_are_resized_to_another_grid() -> None:
    ramp = torch.arange(4.0).repeat(2, 3, 1)[..., None].flatten(0, 2)[None]  # by column
    wider = resize_positions(ramp, (2, 3, 4), (2, 6, 8)).unflatten(1, (2, 6, 8))
    assert wider[0, 1, 3, :, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    assert resize_positions(ramp, (2, 3, 4), (2, 3, 4)) is ramp


@pytest.mark.parametrize(
    "mode, function", [("add", torch.add), ("max", torch.maximum), ("min", torch.minimum)]
)
def test_a_fusion_by_element_is_its_function(mode: str, function: Callable[..., Tensor]) -> None:
    a, b = torch.randn(2, 3, 5, 4)
    fusion = TwoStreamFusion(mode, 8, RevMViTConfig())
    assert torch.equal(fusion(torch.cat([a, b], dim=-1)), function(a, b))


def test_numbers_of_a_fusion_are_its_mlps_width_and_dropout() -> None:
    for mode, width, drop in (("ln+concat_linear_0.5_0.1", 4, 0.1), ("ln+concat_linear", 8, 0)):
        fusion: Any = TwoStreamFusion(mode, 8, RevMViTConfig())
        assert fusion.state_dict()["fuse_fn.1.fc1.weight"].shape == (width, 8)
        assert fusion.fuse_fn[1].drop.p == drop
