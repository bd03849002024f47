"""The parts of a reversible MViT: norms of the last axis, positions, fusions."""

import math
from collections.abc import Callable

import pytest

from tests.helpers import require

require.need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from multibn.torch_backend import SubBatchNorm1d, SyncBatchNorm  # noqa: E402
from multibn.torch_backend.reversible.mvit.layers import (  # noqa: E402
    TwoStreamFusion,
    layer_norm,
    normalize_last_axis,
    relative_position_bias,
)
from multibn.torch_backend.reversible.mvit.layout import round_width  # noqa: E402
from multibn.torch_backend.reversible.mvit.model import (  # noqa: E402
    resize_positions,
    sincos_positions,
)


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
    "make",
    [nn.BatchNorm1d, SyncBatchNorm, lambda dim: SubBatchNorm1d(1, dim)],
    ids=["torch", "synchronized", "sub"],
)
def test_batch_norms_normalize_the_last_axis(make: Callable, shape: tuple[int, ...]) -> None:
    x = 3 + 2 * torch.randn(shape, dtype=torch.float64)
    y = normalize_last_axis(make(5).double(), x)
    axes = tuple(range(len(shape) - 1))
    expected = (x - x.mean(axes)) / (x.var(axes, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)  # torch's own is the coarser one


def test_sub_batch_norm_splits_samples() -> None:
    x = 3 + 2 * torch.randn(6, 2, 7, 5, dtype=torch.float64)
    y = normalize_last_axis(SubBatchNorm1d(2, 5).double(), x)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        torch.testing.assert_close(y[part].mean((0, 1, 2)), torch.zeros(5, dtype=torch.float64))


def test_relative_positions_read_the_vector_of_their_distance() -> None:
    """Each pair of positions reads the vector of its distance, in steps of the finer grid."""
    q = torch.randn(1, 1, 2 * 4, 3, dtype=torch.float64)  # 1 frame, 2 rows, 4 columns
    rows = torch.randn(2 * 4 - 1, 3, dtype=torch.float64)
    columns = torch.randn(2 * 4 - 1, 3, dtype=torch.float64)
    bias = relative_position_bias(q, (1, 2, 4), (1, 4, 2), (None, rows, columns))
    for at in range(8):
        for key in range(8):
            down = 2 * (at // 4) - key // 2
            right = at % 4 - 2 * (key % 2)
            vector = rows[3 + down] + columns[2 + right]
            assert bias[0, 0, at, key] == pytest.approx(float(q[0, 0, at] @ vector))


def test_relative_positions_are_resized_to_another_grid() -> None:
    table = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]  # distances of 3 positions
    q = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    bias = relative_position_bias(q, (1, 1, 6), (1, 1, 6), (None, None, table))
    assert (bias[0, 0].diff(dim=0) >= 0).all()
    assert bias.min() == -1
    assert bias.max() == 1


def test_sines_and_cosines_encode_each_axis() -> None:
    table = sincos_positions(32, (2, 3, 4)).unflatten(1, (2, 3, 4))[0]
    for t, h, w in [(0, 0, 0), (1, 2, 3), (1, 0, 2)]:
        code = []
        for dim, position in ((8, t), (12, w), (12, h)):
            angles = [position / 10000 ** (i / (dim / 2)) for i in range(dim // 2)]
            code += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert table[t, h, w].tolist() == pytest.approx(code)


def test_positions_are_resized_to_another_grid() -> None:
    ramp = torch.arange(4.0).repeat(2, 3, 1)[..., None].flatten(0, 2)[None]  # by column
    wider = resize_positions(ramp, (2, 3, 4), (2, 6, 8)).unflatten(1, (2, 6, 8))
    assert wider[0, 1, 3, :, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    assert resize_positions(ramp, (2, 3, 4), (2, 3, 4)) is ramp


@pytest.mark.parametrize(
    "mode", ["add", "avg", "max", "min", "concat", "concat_linear", "ln+concat_linear_0.5_0.1"]
)
def test_each_fusion_computes_its_formula(mode: str) -> None:
    a, b = torch.randn(2, 3, 5, 4).unbind()
    x = torch.cat([a, b], dim=-1)
    fusion = TwoStreamFusion(mode, 8, layer_norm).eval()
    elementwise = {
        "add": a + b,
        "avg": (a + b) / 2,
        "max": a.maximum(b),
        "min": a.minimum(b),
        "concat": x,
    }
    y = fusion(x)
    torch.testing.assert_close(
        y, elementwise[mode] if mode in elementwise else fusion.fuse_fn(x) + x
    )
    assert ("fuse_fn.1.fc1.weight" in fusion.state_dict()) == mode.startswith("ln+")
