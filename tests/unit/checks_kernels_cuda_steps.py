"""The Triton kernels of the steps against `generic`, see test_kernels_cuda.py."""

import math
import os
from typing import Any

import pytest
import torch

from multibn.kernels import cuda_steps, generic

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has none of this")

GENERATOR = torch.Generator()
SHAPES = [(1,), (2, 3), (256,), (700,), (75,)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, None]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
shapes_of_dtypes = pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES, DTYPES, strict=True)), ids=str
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    GENERATOR.manual_seed(0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, to be told from what was left to `generic`."""
    launches: list[str] = []
    launch = cuda_steps._launch

    def recorded(kernel: Any, *arguments: Any, like: Any) -> None:
        launches.append(kernel.__name__)
        launch(kernel, *arguments, like=like)

    monkeypatch.setattr(cuda_steps, "_launch", recorded)
    return launches


def wide(*shape: int) -> Any:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(DEVICE)


def number(v: float) -> Any:
    return torch.full((), v, dtype=torch.float64, device=DEVICE)


def compare(got: Any, expected: Any, size: Any = None) -> None:
    """Equal but for the last bit, of `size` where that is given; NaN where NaN is expected."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    scale = expected.abs() if size is None else size
    near = (got - expected).abs() <= 1e-15 * scale
    assert bool((near | (got.isnan() & expected.isnan())).all()), (got, expected)


@shapes
@pytest.mark.parametrize("count", [0.0, 1.0, 3.0, 2.0**24 + 1, 2.0**40 + 1])
def test_pack_and_unpack(shape: tuple[int, ...], count: float, launched: list[str]) -> None:
    mean = wide(*shape)
    meansqr = mean**2 + wide(*shape) ** 2
    weight = min(count, 2.0**40 - 1)
    packed = cuda_steps.pack(mean, meansqr, weight, count)
    compare(packed, generic.pack(mean, meansqr, weight, count))
    assert packed[-2:].tolist() == [weight, count]
    summed = 3 * packed
    got = cuda_steps.unpack(summed, shape, weight, count)
    expected = generic.unpack(summed, shape, weight, count)
    compare(got.mean, expected.mean)
    compare(got.var, expected.var, meansqr)
    compare(got.count, expected.count)
    compare(got.element_weight, expected.element_weight)
    assert (got.refused, got.finite) == (False, True)
    assert launched == ["pack", "unpack"]


def test_the_weights_of_a_rank_without_data() -> None:
    """Another rank's data are there; a sum of weights below 1 is that of no data at all."""
    others = generic.pack(wide(5), wide(5) ** 2 + 9, 4.0, 8.0)
    for summed, total in ((others, 4.0), (0 * others, 0.0)):
        got = cuda_steps.unpack(summed, (5,), 0.0, 0.0)
        compare(got.mean, summed[:5] / max(total, 1))
        assert got.element_weight.item() == 0
        assert got.count.item() == 2 * total
    assert got.var.tolist() == [0] * 5


def test_the_variance_is_not_negative_and_a_nan_stays() -> None:
    """What a rank that refuses sends is NaN throughout."""
    mean = torch.tensor([3.0, math.nan, 2.0], dtype=torch.float64, device=DEVICE)
    meansqr = torch.tensor([8.9, 1.0, math.nan], dtype=torch.float64, device=DEVICE)
    summed = generic.pack(mean, meansqr, 2.0, 2.0)
    got = cuda_steps.unpack(summed, (3,), 2.0, 2.0)
    assert got.var[0].item() == 0
    assert got.var.isnan().tolist() == [False, True, True]
    assert got.mean.isnan().tolist() == [False, True, False]
    for found in cuda_steps.unpack(math.nan * summed, (3,), 2.0, 2.0)[:4]:
        assert found.isnan().all()


@shapes_of_dtypes
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0, number(0.1)], ids=["0", "n", "1", "array"])
@pytest.mark.parametrize("factor", [4 / 3, number(4 / 3)], ids=["n", "array"])
def test_move_averages(
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    momentum: Any,
    factor: Any,
    launched: list[str],
) -> None:
    dtype = dtype or torch.float32
    running = wide(*shape).to(dtype), (wide(*shape) ** 2).to(dtype)
    before = [a.clone() for a in running]
    given = (wide(*shape), wide(*shape) ** 2, momentum, factor)
    moved = cuda_steps.move_averages(*running, *given)
    for got, right in zip(moved, generic.move_averages(*running, *given), strict=True):
        if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off
            torch.testing.assert_close(got, right, rtol=2**-7, atol=0)
        else:
            compare(got, right, right.abs() + (dtype == torch.float64))  # there may be cancellation
    assert all(map(torch.equal, running, before))
    assert launched == ["move_averages"]


def test_parameters_of_two_dtypes(launched: list[str]) -> None:
    given = (wide(5).half(), wide(5).float() ** 2, wide(5), wide(5) ** 2, 0.1, number(2.0))
    moved = cuda_steps.move_averages(*given)
    assert [a.dtype for a in moved] == [torch.float16, torch.float32]
    assert all(map(torch.equal, moved, generic.move_averages(*given)))
    assert launched == ["move_averages"]


def test_parts_of_a_message(launched: list[str]) -> None:
    """Arrays that begin anywhere in memory."""
    message = wide(17)
    given = message[1:6], message[6:11], 0.1, 2.0
    compare(cuda_steps.pack(*given), generic.pack(*given))
    summed = generic.pack(wide(5), wide(5) ** 2 + 9, 4.0, 8.0)
    message[5:] = summed
    part = cuda_steps.unpack(message[5:], (5,), 4.0, 8.0)
    for a, b in zip(part, cuda_steps.unpack(summed, (5,), 4.0, 8.0), strict=True):
        assert a is b or torch.equal(a, b)
    assert launched == ["pack", "unpack", "unpack"]


def test_what_is_left_to_generic(launched: list[str]) -> None:
    v, var = wide(5), wide(5) ** 2
    apart = wide(5, 2)[:, 0]
    steps: list[tuple[str, tuple[Any, ...]]] = [
        ("pack", (apart, apart, 1.0, 1.0)),
        ("pack", (v.float(), v.float(), 1.0, 1.0)),
        ("pack", (v[:0], v[:0], 2.0, 3.0)),
        ("unpack", (wide(12, 2)[:, 0], (5,), 1.0, 1.0)),
        ("unpack", (wide(2), (0,), 1.0, 1.0)),
        ("move_averages", (v, apart, v, var, 0.1, 1.0)),
        ("move_averages", (v, var, v, var, number(0.5).expand(5), 1.0)),
        ("move_averages", (v, var, v, var, 0.1, number(0.5).half())),
    ]
    for name, arguments in steps:
        got = getattr(cuda_steps, name)(*arguments)
        expected = getattr(generic, name)(*arguments)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert launched == []


@on_gpu
def test_capture_in_a_graph() -> None:
    v, var, weight = wide(700), wide(700) ** 2, wide(700).half()

    def steps() -> list[Any]:
        packed = cuda_steps.pack(v, v**2 + var, 5.0, 5.0)
        *batch, _, _ = cuda_steps.unpack(packed, (700,), 5.0, 5.0)
        mean, found, count, element_weight = batch
        moved = cuda_steps.move_averages(weight, weight, mean, found, element_weight, count)
        return [packed, *batch, *moved]

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps()
    v.copy_(2 * wide(700))
    graph.replay()
    for a, b in zip(got, steps(), strict=True):
        assert torch.equal(a, b)
