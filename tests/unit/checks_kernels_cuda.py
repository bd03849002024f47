"""The Triton kernels against float64, on a GPU or interpreted: see test_kernels_cuda.py."""

import os
from typing import Any

import pytest
import torch

from multibn.kernels import cuda, generic

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has none of this")

AXIS = (0, 2, 3)
EPS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
GENERATOR = torch.Generator()
layouts = pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    GENERATOR.manual_seed(0)


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous_format"
) -> Any:
    """Channel c has mean c and standard deviation 1 + c."""
    c = torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2))
    x = (torch.randn(shape, generator=GENERATOR) * (1 + c) + c).to(DEVICE, dtype)
    return x.to(memory_format=getattr(torch, layout))


def check(
    x: Any, axis: tuple[int, ...] | None = None, dy: Any = None, *, native: bool = True
) -> None:
    """All four passes against float64 ones; `native` says whether Triton is to do them."""
    axis = tuple(i for i in range(x.ndim) if i != 1) if axis is None else axis
    assert (cuda._plan(x, axis) is not None) is native
    eps = EPS[x.dtype]
    sums_eps = min(eps, 1e-6)  # 16-bit values are added in float32
    exact = x.double()
    expected_var, expected_mean = torch.var_mean(exact, axis, correction=0)
    std = expected_var.sqrt()
    mean, var = cuda.local_moments(x, axis=axis)
    assert mean.dtype == var.dtype == torch.float64
    close((mean - expected_mean) / std, 0 * std, sums_eps)
    close(var / expected_var, std / std, sums_eps)

    dy = torch.randn(x.shape, generator=GENERATOR).to(DEVICE, x.dtype) if dy is None else dy
    forward = (mean, std + 1, mean - 1)
    backward = (mean, std + 1, std, mean - 1)
    y = cuda.normalize(x, *forward, axis=axis)
    dx = cuda.input_gradient(dy, x, *backward, axis=axis)
    for got, expected in (
        (y, generic.normalize(exact, *forward, axis=axis)),
        (dx, generic.input_gradient(dy.double(), exact, *backward, axis=axis)),
    ):
        assert got.dtype == x.dtype
        assert got.stride() == torch.empty_like(x).stride()
        close(got.double(), expected, eps * float(expected.abs().max()))

    sums = cuda.backward_sums(dy, x, mean, axis=axis)
    expected_sums = generic.backward_sums(dy.double(), exact, mean, axis=axis)
    sizes = generic.backward_sums(dy.double().abs(), exact.abs() + 1, 0 * mean, axis=axis)
    for got, expected, size in zip(sums, expected_sums, sizes, strict=True):
        assert got.dtype == torch.float64
        close((got - expected) / size, 0 * size, sums_eps)


def close(got: Any, expected: Any, atol: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@layouts
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_dtypes(dtype: torch.dtype, layout: str) -> None:
    check(normal(3, 5, 7, 9, dtype=dtype, layout=layout))


@pytest.mark.parametrize(
    "shape", [(6, 3), (4, 1), (4, 3, 6), (2, 1, 3, 3), (2, 3, 1, 1), (2, 3, 2, 3, 2)], ids=str
)
def test_shapes(shape: tuple[int, ...]) -> None:
    check(normal(*shape))
    if len(shape) == 5:
        check(normal(*shape, layout="channels_last_3d"))


def test_several_blocks_of_channels() -> None:
    check(normal(2, 75, 2, 3, layout="channels_last"))


@layouts
def test_several_splits_of_several_tiles(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large activations are divided into, on a small one."""
    monkeypatch.setattr(cuda, "_PROGRAMS", 8)
    monkeypatch.setattr(cuda, "_TILE", 128)
    monkeypatch.setattr(cuda, "_MERGED", 2)
    x = normal(7, 3, 9, 11, layout=layout)
    plan = cuda._plan(x, AXIS)
    assert plan is not None
    assert plan.tiles_per_program > 1
    assert plan.splits > 2
    check(x)


@layouts
def test_a_large_mean(layout: str) -> None:
    x = (1e4 + torch.randn(3, 5, 7, 9, generator=GENERATOR)).to(DEVICE)
    x = x.to(memory_format=getattr(torch, layout))
    exact = x.double()
    expected_var, expected_mean = torch.var_mean(exact, AXIS, correction=0)
    mean, var = cuda.local_moments(x, axis=AXIS)
    close(mean, expected_mean, 1e-6)
    close(var / expected_var, var / var, 1e-6)
    y = cuda.normalize(x, mean, var**-0.5, 0 * mean, axis=AXIS)
    close(y.double(), generic.normalize(exact, mean, var**-0.5, 0 * mean, axis=AXIS), 1e-6)
    dy = x - 9999
    sums = cuda.backward_sums(dy, x, mean, axis=AXIS)
    expected_sums = generic.backward_sums(dy.double(), exact, mean, axis=AXIS)
    for got, expected in zip(sums, expected_sums, strict=True):
        close(got / expected, var / var, 1e-6)
    dx = cuda.input_gradient(dy, x, mean, var, var, 0 * mean, axis=AXIS)
    expected = generic.input_gradient(dy.double(), exact, mean, var, var, 0 * mean, axis=AXIS)
    close(dx.double(), expected, 1e-5)


def test_a_first_tile_unlike_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean, which centres the others, is then a poor one."""
    monkeypatch.setattr(cuda, "_PROGRAMS", 1)
    x = torch.randn(64, 2, 16, 16, generator=GENERATOR).to(DEVICE) + 1000
    x[:8] = 0
    plan = cuda._plan(x, AXIS)
    assert plan is not None
    assert (plan.tiles_per_program, plan.splits) == (8, 1)
    _, var = cuda.local_moments(x, axis=AXIS)
    close(var / x.double().var(AXIS, correction=0), var / var, 1e-6)


def test_invalid_values_are_not_hidden() -> None:
    x = normal(3, 2, 4, 4)
    x[1, 1, 2, 2] = torch.nan
    mean, var = cuda.local_moments(x, axis=AXIS)
    assert mean.isnan().tolist() == var.isnan().tolist() == [False, True]


def test_two_channel_axes() -> None:
    """As SubBatchNorm has them."""
    x = normal(6, 3, 4, 5).unflatten(0, (3, 2))
    check(x, (0, 3, 4))
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)
    check(apart, (0, 3, 4), native=False)


def test_a_gradient_laid_out_otherwise() -> None:
    x = normal(3, 2, 4, 5)
    check(x, dy=normal(3, 2, 4, 5, layout="channels_last"))
    check(x, dy=torch.ones((), device=DEVICE).expand(3, 2, 4, 5))


@layouts
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_residual_and_relu(layout: str, native: bool, relu: bool) -> None:
    x = normal(3, 2, 4, 5, layout=layout)
    residual = normal(3, 2, 4, 5)
    x = x if native else x.repeat_interleave(2, 3)[..., ::2]
    assert (cuda._plan(x, AXIS) is not None) is native
    x[0, 0, 0, 0] = torch.nan
    c = torch.tensor([1.0, 2.0], dtype=torch.float64, device=DEVICE)
    plain = cuda.normalize(x, c, c, -c, axis=AXIS)
    for added, given in ((residual, residual), (0, None)):
        expected = (plain + added).relu() if relu else plain + added
        got = cuda.normalize_add_relu(x, c, c, -c, given, relu, axis=AXIS)
        assert got.stride() == plain.stride()
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_what_is_left_to_generic() -> None:
    check(normal(3, 2, 8, 5)[:, :, ::2], native=False)
    check(normal(3, 1, 4, 5).expand(3, 2, 4, 5), native=False)
    empty = torch.empty(0, 2, 4, 5, device=DEVICE)
    mean, var = cuda.local_moments(empty, axis=AXIS)
    assert mean.tolist() == var.tolist() == [0, 0]
    assert cuda.normalize(empty, mean, var, var, axis=AXIS).shape == empty.shape


@on_gpu
def test_capture_in_a_graph() -> None:
    x = normal(8, 16, 14, 14)

    def passes() -> list[Any]:
        mean, var = cuda.local_moments(x, axis=AXIS)
        y = cuda.normalize(x, mean, var, mean, axis=AXIS)
        sums = cuda.backward_sums(y, x, mean, axis=AXIS)
        return [mean, var, y, *sums, cuda.input_gradient(y, x, mean, var, *sums, axis=AXIS)]

    passes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = passes()
    x.copy_(2 * normal(8, 16, 14, 14))
    graph.replay()
    for a, b in zip(got, passes(), strict=True):
        assert torch.equal(a, b)


@on_gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.ones((1 << 15, 3, 1 << 15, 1), dtype=torch.float16, device="cuda")
    x[-1, -1, -1] = 3
    mean, _ = cuda.local_moments(x, axis=AXIS)
    close(mean.cpu(), torch.tensor([1, 1, 1 + 2 / 2**30], dtype=torch.float64), 1e-12)
    y = cuda.normalize(x, 0 * mean, 0 * mean + 2, 0 * mean, axis=AXIS)
    assert y[-1, -1, -1].item() == 6
