"""The Triton kernels of the steps against `generic`, see test_kernels_cuda.py."""

import math
import os
from typing import Any

import pytest
import torch

from multibn import kernels
from multibn.kernels import cuda_steps, generic
from multibn.torch_backend import SyncBatchNorm, modules

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

    def recorded(kernel: Any, *arguments: Any, like: Any, **constants: Any) -> None:
        launches.append(kernel.__name__)
        launch(kernel, *arguments, like=like, **constants)

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


@shapes_of_dtypes
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0, None], ids=["0", "n", "1", "cumulative"])
@pytest.mark.parametrize("factor", [None, 1.25], ids=["unbiased", "n"])
@pytest.mark.parametrize("count", [0.0, 1.0, 7.0, math.nan])
def test_move_in_place(
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    momentum: float | None,
    factor: float | None,
    count: float,
    launched: list[str],
) -> None:
    """As the steps of `population.update_running`; a batch without elements changes nothing."""
    dtype = dtype or torch.float32
    running = wide(*shape).to(dtype), (wide(*shape) ** 2).to(dtype)
    num_batches = torch.full((), 4, device=DEVICE)
    before = [a.clone() for a in running]
    batch = wide(*shape), wide(*shape) ** 2
    if math.isnan(count):  # another rank refused its input
        batch = batch[0] * math.nan, batch[1] * math.nan
    n = number(count)
    expected_batches = 4 + int(count > 0)
    a = (1 / expected_batches if momentum is None else momentum) * (n > 0).double()
    expected = generic.move_averages(
        *running, *batch, a, n / (n - 1).clamp(1) if factor is None else factor
    )
    versions = [v._version for v in (*running, num_batches)]
    assert cuda_steps.move_in_place(*running, num_batches, *batch, n, momentum, factor)
    for moved, right, old in zip(running, expected, before, strict=True):
        if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off
            torch.testing.assert_close(moved, right, rtol=2**-7, atol=0, equal_nan=True)
        else:
            compare(moved, right, right.abs() + (dtype == torch.float64))
        if count == 0:
            assert torch.equal(moved, old)
        # Nobody looks at a message in a replayed CUDA graph: this is where a program can look.
        assert moved.isnan().all() == math.isnan(count)
    assert num_batches.item() == expected_batches
    # Autograd tells by the version that a saved tensor has changed.
    assert all(v._version > old for v, old in zip((*running, num_batches), versions, strict=True))
    assert launched == ["move_in_place"]


def test_move_in_place_without_a_counter(launched: list[str]) -> None:
    running = wide(5), wide(5) ** 2
    batch = wide(5), wide(5) ** 2
    expected = generic.move_averages(*running, *batch, 0.1, 1.0)
    assert cuda_steps.move_in_place(*running, None, *batch, number(3.0), 0.1, 1.0)
    for moved, right in zip(running, expected, strict=True):
        compare(moved, right, right.abs() + 1)
    assert launched == ["move_in_place"]


@pytest.mark.parametrize("momentum", [0.1, None], ids=["n", "cumulative"])
@pytest.mark.parametrize("convention", ["unbiased_global", "unbiased_local", "biased"])
def test_a_layer_moves_its_running_statistics_in_one_launch(
    momentum: float | None, convention: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [SyncBatchNorm(3, momentum=momentum, running_var=convention) for _ in range(2)]
    there, here = layers[0].to(DEVICE), layers[1]
    for _ in range(3):
        x = wide(4, 3, 5).float()
        here(x.cpu())
        with monkeypatch.context() as patch:
            if DEVICE == "cpu":  # as for tensors on a GPU
                patch.setattr(modules, "is_on_host", lambda a: False)
                patch.setattr(kernels, "_kind", lambda x, others: "cuda")
            launched.clear()
            there(x)
        assert launched == ["unpack", "move_in_place"]
    state, expected = there.state_dict(), here.state_dict()
    assert state["num_batches_tracked"].item() == 3
    for name in expected:
        torch.testing.assert_close(state[name].cpu(), expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_infinity_of_one_channel_is_in_its_running_statistics() -> None:
    """Also where nobody looks at messages: while a CUDA graph is replayed."""
    moments = torch.tensor([1.0, math.inf, 2.0], dtype=torch.float64, device=DEVICE)
    summed = generic.pack(moments, moments**2, 2.0, 2.0)
    mean, var, count, _ = cuda_steps.unpack(summed, (3,), 2.0, 2.0)[:4]
    running = wide(3).float(), wide(3).float()
    assert cuda_steps.move_in_place(*running, None, mean, var, count, 0.1, None)
    for moved in running:
        assert moved.isfinite().tolist() == [True, False, True]


def test_what_cannot_be_moved_in_place(launched: list[str]) -> None:
    v, var, n = wide(5), wide(5) ** 2, number(3.0)
    with torch.inference_mode():
        frozen = v.clone()
    one_rank = torch.zeros((), device=DEVICE)
    apart = wide(5, 2)[:, 0]
    for arguments in (
        (v, apart, None, v, var, n, 0.1, 1.0),
        (frozen, var, None, v, var, n, 0.1, 1.0),
        (v, var, one_rank, v, var, n, 0.1, 1.0),
        (v, var, None, v, var, 3.0, 0.1, 1.0),
    ):
        before = [a.clone() for a in arguments[:2]]
        assert not cuda_steps.move_in_place(*arguments)
        assert all(map(torch.equal, arguments[:2], before))
    assert launched == []


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
