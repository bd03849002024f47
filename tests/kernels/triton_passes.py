"""The Triton kernels against float64, on a GPU or interpreted: see test_cuda.py."""

import contextlib
import gc
import math
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from multibn import kernels
from multibn.kernels import Gradient, Input, Running, cuda, generic
from multibn.kernels.layout import sizes
from multibn.kernels.triton import launch as cuda_steps
from multibn.message import Message, lanes, num_lanes
from tests.kernels.passes import Verbs, patch_the_interpreter_once

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
if DEVICE == "cpu":
    patch_the_interpreter_once()
verbs, reference = Verbs(cuda), Verbs(generic)
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has none of this")

AXIS = (0, 2, 3)
VAR_EPS = 0.1  # float32 has no such number
EPS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
GENERATOR = torch.Generator()
layouts = pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])


@pytest.fixture(autouse=True)
def _afresh() -> None:
    GENERATOR.manual_seed(0)
    cuda._plan_of.cache_clear()  # of what other tests changed the constants to


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, to be told from what was left to `generic`."""
    launches: list[str] = []
    launch = cuda.launch

    def recorded(kernel: Any, programs: int, arguments: Any, constants: Any, *others: Any) -> None:
        launches.append(kernel.__name__)
        # In the interpreter every operation is rounded.
        assert constants["enable_fp_fusion"] is ("DTYPE" in constants)
        with _disable_current_modes():  # the interpreter's operations are no launches
            launch(kernel, programs, arguments, constants, *others)

    for file in (cuda, cuda_steps):
        monkeypatch.setattr(file, "launch", recorded)
    return launches


def plan_of(x: Any, axis: Any = AXIS) -> Any:
    return cuda._plan_of(x.shape, x.stride(), x.dtype, axis, x.device)


def local_moments(x: Any, axis: Any = AXIS) -> Any:
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    mean, meansqr = generic.split_sums(verbs.begin_forward(x, 1.0, 1.0, axis=axis)[:-2], shape)
    return mean, meansqr - mean * mean


def backward_sums(dy: Any, x: Any, mean: Any, var: Any, eps: float, axis: Any = AXIS) -> Any:
    payload: Any
    payload, *_ = verbs.begin_backward(dy, x, mean, var, None, None, eps=eps, axis=axis)
    return generic.split_sums(payload, mean.shape)


def input_gradient(dy: Any, x: Any, *statistics: Any, eps: float, axis: Any = AXIS) -> Any:
    """`statistics` are what `generic.input_gradient` takes."""
    mean, var, weight, element_weight, *sums = statistics
    summed = torch.cat([v.flatten() for v in sums])
    parameters = weight, None, element_weight
    dx, _ = verbs.finish_backward(summed, dy, x, mean, var, *parameters, eps=eps, axis=axis)
    return dx


def wide(*shape: int) -> Any:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(DEVICE)


def number(v: float) -> Any:
    return torch.full((), v, dtype=torch.float64, device=DEVICE)


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
    """All passes against float64 ones; `native` says whether Triton is to do them."""
    axis = tuple(i for i in range(x.ndim) if i != 1) if axis is None else axis
    assert (plan_of(x, axis) is not None) is native
    eps = min(EPS[x.dtype], 1e-6)  # 16-bit values are added in float32
    expected_var, expected_mean = torch.var_mean(x.double(), axis, correction=0)
    std = expected_var.sqrt()
    mean, var = local_moments(x, axis)
    assert mean.dtype == var.dtype == torch.float64
    close((mean - expected_mean) / std, 0 * std, eps)
    close(var / expected_var, std / std, eps)
    weight, count = 7.0, 2.0**24 + 1
    packed = verbs.begin_forward(x, weight, count, axis=axis)
    plain = verbs.begin_forward(x, 1.0, 1.0, axis=axis)
    assert torch.equal(packed[:-2], weight * plain[:-2])
    assert packed[-2:].tolist() == [weight, count]

    dy = torch.randn(x.shape, generator=GENERATOR).to(DEVICE, x.dtype) if dy is None else dy
    check_normalize(x, mean, var, wide(*mean.shape), wide(*mean.shape).float(), axis)
    sums = check_backward_sums(dy, x, mean, var, axis)
    element_weight = number(0.5 / sizes(x.shape, axis)[1])  # not all of `dy` cancels
    check_input_gradient(dy, x, mean, var, wide(*mean.shape), element_weight, *sums, axis)


def check_normalize(x: Any, mean: Any, var: Any, weight: Any, bias: Any, axis: Any = AXIS) -> None:
    statistics = mean, var, weight, bias
    y = verbs.normalize(x, *statistics, eps=VAR_EPS, axis=axis)
    check_like(x, y, reference.normalize(x.double(), *statistics, eps=VAR_EPS, axis=axis))


def check_backward_sums(dy: Any, x: Any, mean: Any, var: Any, axis: Any = AXIS) -> Any:
    sums = backward_sums(dy, x, mean, var, VAR_EPS, axis)
    eps = min(EPS[x.dtype], 1e-6)  # 16-bit values are added in float32
    dy, x = dy.double(), x.double()
    expected = reference.backward_sums(dy, x, mean, var, eps=VAR_EPS, axis=axis)
    sizes = reference.backward_sums(dy.abs(), x.abs() + 1, 0 * mean, var, eps=VAR_EPS, axis=axis)
    for got, right, size in zip(sums, expected, sizes, strict=True):
        assert got.dtype == torch.float64
        assert got.shape == mean.shape
        close((got - right) / size, 0 * size, eps)
    return sums


def check_input_gradient(dy: Any, x: Any, *statistics: Any) -> None:
    """`statistics` are what `input_gradient` takes, and the axis."""
    *given, axis = statistics
    dx = input_gradient(dy, x, *given, eps=VAR_EPS, axis=axis)
    expected = reference.input_gradient(dy.double(), x.double(), *given, eps=VAR_EPS, axis=axis)
    check_like(x, dx, expected)


def check_like(x: Any, got: Any, expected: Any) -> None:
    """Laid out as `x` and, for its dtype, near `expected`."""
    assert got.dtype == x.dtype
    assert got.stride() == torch.empty_like(x).stride()
    close(got.double(), expected, EPS[x.dtype] * float(expected.abs().max()))


def close(got: Any, expected: Any, atol: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@layouts
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_dtypes(dtype: torch.dtype, layout: str) -> None:
    check(normal(3, 5, 7, 9, dtype=dtype, layout=layout))


@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_planes_that_begin_inside_of_vectors(dtype: torch.dtype) -> None:
    x = normal(3, 8, 5, 13, dtype=dtype)
    assert plan_of(x).sums.constants["VECTOR"] == 16 // x.element_size()
    check(x)


@layouts
@pytest.mark.parametrize("parameter", [*EPS, None], ids=str)
def test_dtypes_of_parameters(
    parameter: torch.dtype | None, layout: str, launched: list[str]
) -> None:
    """And their absence, and a number in place of an array."""
    x = normal(3, 5, 2, 3, dtype=torch.float64, layout=layout)
    dy = torch.randn(x.shape, generator=GENERATOR).to(DEVICE)
    mean, var = wide(5), wide(5) ** 2
    weight = None if parameter is None else wide(5).to(parameter)
    bias = wide(5).to(parameter or torch.float32)
    check_normalize(x, mean, var, weight, bias)
    check_normalize(x, mean, var, weight, None)
    sums = wide(5), wide(5)
    for element_weight in (0.0, 1 / 3, number(1 / 3)):
        check_input_gradient(dy, x, mean, var, weight, element_weight, *sums, AXIS)
    normalized, derived = (["coefficients_of", name] for name in ("normalize", "input_gradient"))
    assert launched == normalized * 2 + derived * 3


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
    monkeypatch.setattr(cuda, "_SUMS", 12)
    monkeypatch.setattr(cuda, "_ELEMENTWISE", 8)
    monkeypatch.setattr(cuda, "_TILE", 64)
    monkeypatch.setitem(cuda_steps._FEW_SPLITS, "SPLITS", 2)
    monkeypatch.setitem(cuda_steps._FEW_SPLITS, "BLOCK", 2)
    x = normal(7, 4, 9, 11, layout=layout)
    plan = plan_of(x)
    assert plan is not None
    assert plan.sums.sizes[7] > 1  # tiles of a program
    assert plan.elementwise[0].sizes[7] > 1
    assert plan.sums.splits > 2
    check(x)


@layouts
def test_a_large_mean(layout: str) -> None:
    x = (1e4 + torch.randn(3, 5, 7, 9, generator=GENERATOR)).to(DEVICE)
    x = x.to(memory_format=getattr(torch, layout))
    exact = x.double()
    expected_var, expected_mean = torch.var_mean(exact, AXIS, correction=0)
    mean, var = local_moments(x)
    close(mean, expected_mean, 1e-6)
    close(var / expected_var, var / var, 1e-6)
    for bias in (None, 0 * mean):
        y = verbs.normalize(x, mean, var, None, bias, eps=0.0, axis=AXIS)
        expected = reference.normalize(exact, mean, var, None, bias, eps=0.0, axis=AXIS)
        close(y.double(), expected, 1e-6)
    dy = x - 9999
    sums = backward_sums(dy, x, mean, var, 0.0)
    expected_sums = reference.backward_sums(dy.double(), exact, mean, var, eps=0.0, axis=AXIS)
    for got, expected in zip(sums, expected_sums, strict=True):
        close(got / expected, var / var, 1e-6)
    given = mean, var, var, 1 / 189, *sums
    dx = input_gradient(dy, x, *given, eps=0.0, axis=AXIS)
    expected = reference.input_gradient(dy.double(), exact, *given, eps=0.0, axis=AXIS)
    close(dx.double(), expected, 1e-6)


@pytest.mark.parametrize("count", [0.0, 2.0**40 + 1])
@layouts
def test_packed_moments(layout: str, count: float, launched: list[str]) -> None:
    """Numbers that float32 would round; constants, which have no variance over ranks."""
    values = torch.randn(1, 5, 1, 1, generator=GENERATOR).to(DEVICE)
    x = values.expand(2, 5, 2, 4).contiguous(memory_format=getattr(torch, layout))
    packed = verbs.begin_forward(x, count, count + 1, axis=AXIS)
    mean = values.double().flatten()
    assert torch.equal(packed, generic.pack(mean, mean * mean, count, count + 1))
    packed = verbs.begin_forward(x, 4.0, 4.0, axis=AXIS)
    batch, _ = generic.unpack(packed + packed, (5,), 4.0, 4.0)
    assert not batch.var.any()
    assert launched == 2 * ["moments", "merge_moments"]


def test_a_first_tile_unlike_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean, which centres the others, is then a poor one."""
    monkeypatch.setattr(cuda, "_SUMS", 1)
    x = torch.randn(64, 2, 16, 16, generator=GENERATOR).to(DEVICE) + 1000
    x[:8] = 0
    plan = plan_of(x)
    assert plan is not None
    assert (plan.sums.sizes[7], plan.sums.splits) == (8, 1)
    _, var = local_moments(x)
    close(var / x.double().var(AXIS, correction=0), var / var, 1e-6)


def test_invalid_values_are_not_hidden() -> None:
    x = normal(3, 2, 4, 4)
    x[1, 1, 2, 2] = torch.nan
    mean, var = local_moments(x)
    assert mean.isnan().tolist() == var.isnan().tolist() == [False, True]
    packed = verbs.begin_forward(x, 1.0, 1.0, axis=AXIS)
    assert packed.isnan().tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize("which", ["var", "mean"])
def test_statistics_that_are_nan(which: str, launched: list[str]) -> None:
    """On a GPU nobody has looked at them: everything from them is NaN, but for the sum of `dy`."""
    x, one = normal(3, 2, 4, 4), torch.ones(2, dtype=torch.float64, device=DEVICE)
    bad = torch.tensor([1, math.nan], dtype=torch.float64, device=DEVICE)
    mean, var = (one, bad) if which == "var" else (bad, one)
    sums = backward_sums(x, x, mean, var, VAR_EPS)
    assert [v.isnan().tolist() for v in sums] == [[False, False], [False, True]]
    y = verbs.normalize(x, mean, var, one, one, eps=VAR_EPS, axis=AXIS)
    dx = input_gradient(x, x, mean, var, one, 0.5, one, one, eps=VAR_EPS, axis=AXIS)
    for v in (y, dx):
        assert v.isnan().all(AXIS).tolist() == v.isnan().any(AXIS).tolist() == [False, True]
    assert launched == [
        "backward_sums", "merge_sums", "coefficients_of", "normalize", "coefficients_of",
        "input_gradient",
    ]  # fmt: skip


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
    assert (plan_of(x) is not None) is native
    x[0, 0, 0, 0] = torch.nan
    c = torch.tensor([1.0, 2.0], dtype=torch.float64, device=DEVICE)
    given = c, c, c, -c
    plain = verbs.normalize(x, *given, eps=VAR_EPS, axis=AXIS)
    for added, to_add in ((residual, residual), (0, None)):
        expected = (plain + added).relu() if relu else plain + added
        got = verbs.normalize(x, *given, eps=VAR_EPS, axis=AXIS, residual=to_add, relu=relu)
        assert got.stride() == plain.stride()
        torch.testing.assert_close(got, expected, equal_nan=True)


@layouts
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_verbs(layout: str, has_residual: bool, masked: bool, launched: list[str]) -> None:
    """A pass each way with ReLU, against `generic`; what a mask leaves out may be NaN."""
    x, dy = normal(3, 5, 4, 6, layout=layout), normal(3, 5, 4, 6, layout=layout)
    residual = normal(3, 5, 4, 6) if has_residual else None
    weight, bias = wide(5).float(), wide(5).float()
    mask = torch.rand((3, 1, 4, 6), generator=GENERATOR).to(DEVICE) < 0.7 if masked else None
    if mask is not None:
        x, dy = (torch.where(mask, v, math.nan) for v in (x, dy))
        x = x.contiguous(memory_format=getattr(torch, layout))
    count = 72.0 if mask is None else float(mask.sum())
    on: Any = {"axis": AXIS, "mask": mask}
    found = []
    for file in (verbs, reference):
        running = Running(torch.zeros_like(weight), torch.ones_like(weight), 0.1)
        summed = file.begin_forward(x, count, count, **on)
        y, *batch, state = file.finish_forward(
            summed, x, weight, bias, count, count, eps=VAR_EPS, residual=residual, relu=True,
            running=running, **on,
        )  # fmt: skip
        mean, var, _, element_weight = batch
        about = dy, x, mean, var, weight, bias
        options = {"eps": VAR_EPS, "relu": True, "y": y if has_residual else None, **on}
        sums, dweight, dbias, *begun = file.begin_backward(*about, **options)
        dx, dresidual = file.finish_backward(sums, *about, element_weight, begun=begun, **options)
        assert state == generic.RIGHT
        assert (dresidual is None) is (not has_residual)
        gradients = dx, dweight, dbias, *(v for v in (dresidual,) if v is not None)
        found.append([y, *batch, *running[:2], *gradients])
    for got, right in zip(*found, strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    forward = ["moments", "merge_moments", "finish_forward", "normalize"]
    again = [] if has_residual else ["coefficients_of"]
    backward = [*again, "backward_sums", "merge_sums", "input_gradient"]
    assert launched == forward + backward


@layouts
def test_padding(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits whose first tiles are padding, a large mean, counts as they are on a GPU."""
    monkeypatch.setattr(cuda, "_SUMS", 2)
    monkeypatch.setattr(cuda, "_TILE", 64)
    x = (1e4 + torch.randn(6, 4, 5, 17, generator=GENERATOR)).to(DEVICE)
    mask = torch.zeros((6, 1, 5, 17), dtype=torch.bool, device=DEVICE)
    mask[1::2, :, 1:, 9:15] = True
    exact = x.double()[1::2, :, 1:, 9:15]
    x = torch.where(mask, x, math.nan).contiguous(memory_format=getattr(torch, layout))
    count = number(72.0)
    summed = verbs.begin_forward(x, count, count, axis=AXIS, mask=mask)
    var, mean = torch.var_mean(exact, AXIS, correction=0)
    given: Any = None, None, count, count
    y, found_mean, found_var, total, element_weight, _ = verbs.finish_forward(
        summed, x, *given, eps=VAR_EPS, axis=AXIS, mask=mask
    )
    close(found_mean, mean, 1e-6)
    close(found_var / var, var / var, 1e-6)
    assert (total.item(), element_weight.item()) == (72, 1 / 72)
    assert bool((y[~mask.expand_as(y)] == 0).all())
    none = verbs.begin_forward(x, 0 * count, 0 * count, axis=AXIS, mask=mask & False)
    assert none.tolist() == [0] * 10


@layouts
def test_the_sign_of_an_output_is_that_of_the_forward_pass(layout: str) -> None:
    """Where outputs round to 0 or are a rounding error from it."""
    x = normal(3, 5, 7, 9, layout=layout)
    x[0] = x.mean(AXIS).view(1, 5, 1, 1)
    mean, var = x.double().mean(AXIS), x.double().var(AXIS, correction=0)
    weight, bias = wide(5).float(), torch.zeros(5, device=DEVICE)
    bias[2] = 1e-30
    on: Any = {"eps": VAR_EPS, "axis": AXIS, "relu": True}
    y = verbs.normalize(x, mean, var, weight, bias, **on)
    given = torch.zeros(10, dtype=torch.float64, device=DEVICE), torch.ones_like(x), x, mean, var
    dx, _ = verbs.finish_backward(*given, weight, bias, number(0.0), **on)
    assert torch.equal(dx != 0, y > 0)


@pytest.mark.parametrize(
    ("dtype", "smallest"), [(torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133)]
)
def test_the_sign_of_an_output_is_that_of_its_rounded_number(
    dtype: torch.dtype, smallest: float
) -> None:
    x = torch.ones((1, 4, 3, 8), dtype=dtype, device=DEVICE)
    mean, var = wide(4) * 0 + 1, wide(4) ** 2
    bias = torch.tensor([0.4, 0.5, 0.6, 1.0], device=DEVICE) * smallest  # half of it is even
    dx, _ = verbs.finish_backward(
        torch.zeros(8, dtype=torch.float64, device=DEVICE), torch.ones_like(x), x, mean, var, None,
        bias, number(0.0), eps=VAR_EPS, axis=AXIS, relu=True,
    )  # fmt: skip
    assert (dx != 0).all((0, 2, 3)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("start", [0, 3, 2000])
@pytest.mark.parametrize("file", [verbs, reference], ids=["cuda", "generic"])
def test_a_message_in_memory_of_its_own(start: int, file: Verbs, launched: list[str]) -> None:
    """Zeros before the payload, the payload, zeros and the fingerprint after the payload.

    The same for two layers that share a message.
    """
    x, mean, var = normal(2, 5, 3, 3), wide(5), wide(5) ** 2

    def written(phase: str, out: Message | None = None) -> Any:
        if phase == "forward":
            return file.begin_forward(x, 2.0, 3.0, axis=AXIS, out=out)
        about = x, x, mean, var, None, None
        return file.begin_backward(*about, eps=VAR_EPS, axis=AXIS, out=out)[0]

    for phase, n in (("forward", 12), ("backward", 10)):
        payload = written(phase).tolist()
        for layers in (1, 2):
            length = start + layers * n + num_lanes(phase, layers)
            numbers = torch.full((length,), math.nan, dtype=torch.float64).to(DEVICE)
            message = Message(numbers, start, 7.0)
            for part in message.split([n] * layers) if layers > 1 else [message]:
                assert written(phase, part) is part
            right = start * [0] + layers * payload + lanes(phase, 7.0, layers)
            assert numbers.tolist() == right
    assert (launched == []) is (file is reference)


def test_what_is_left_to_generic(launched: list[str]) -> None:
    check(normal(3, 2, 8, 5)[:, :, ::2], native=False)
    check(normal(3, 1, 4, 5).expand(3, 2, 4, 5), native=False)
    empty = torch.empty(0, 2, 4, 5, device=DEVICE)
    mean, var = local_moments(empty)
    assert mean.tolist() == var.tolist() == [0, 0]
    packed = verbs.begin_forward(empty, 0.0, 0.0, axis=AXIS)
    assert packed.tolist() == [0] * 6
    y = verbs.normalize(empty, mean, var, None, None, eps=VAR_EPS, axis=AXIS)
    assert y.shape == empty.shape
    assert launched == []


def test_per_channel_arrays_that_are_left_to_generic(launched: list[str]) -> None:
    x, dy = normal(2, 5, 3, 3), normal(2, 5, 3, 3)
    v, var, apart = wide(5), wide(5) ** 2, (wide(5, 2) ** 2)[:, 0]
    whole, half = torch.arange(5, device=DEVICE), number(0.5).float()
    square = var.view(5, 1)
    passes: list[tuple[str, tuple[Any, ...]]] = [
        ("normalize", (x, apart, var, None, None)),
        ("normalize", (x, v, apart, None, None)),
        ("normalize", (x, v.float(), var.float(), None, None)),
        ("normalize", (x, v, var, apart, None)),
        ("normalize", (x, v, var, None, apart)),
        ("normalize", (x, v, var, whole, None)),
        ("normalize", (x, v, var, None, v[:1])),
        ("normalize", (x, square, square, None, square)),
        ("backward_sums", (dy, x, apart, var)),
        ("backward_sums", (dy, x, v, apart)),
        ("input_gradient", (dy, x, apart, var, v, 0.5, v, v)),
        ("input_gradient", (dy, x, v, apart, v, 0.5, v, v)),
        ("input_gradient", (dy, x, v, var, apart, 0.5, v, v)),
        ("input_gradient", (dy, x, v, var, whole, 0.5, v, v)),
        ("input_gradient", (dy, x, v, var, None, half, v, v)),
        ("input_gradient", (dy, x, v, var, None, number(0.5).reshape(1), v, v)),
    ]
    for name, given in passes:
        function: Any = {"backward_sums": backward_sums, "input_gradient": input_gradient}.get(name)
        got = (function or verbs.normalize)(*given, eps=VAR_EPS, axis=AXIS)
        expected = getattr(reference, name)(*given, eps=VAR_EPS, axis=AXIS)
        torch.testing.assert_close(tuple(got), tuple(expected), rtol=0, atol=0)
        assert launched == []
    elsewhere = v.to("meta")
    assert cuda_steps.fit(x.device, (5,), (v, var), (v, None))
    assert not cuda_steps.fit(x.device, (5,), (elsewhere, elsewhere))
    assert not cuda_steps.fit(x.device, (5,), (v, var), (v, elsewhere))
    sums = wide(10)
    for payload in (wide(12, 2)[:, 0], wide(12).view(12, 1)[:, 0].float()):
        share = 4.0, 4.0
        found = verbs.finish_forward(payload, x, v, v, *share, eps=VAR_EPS, axis=AXIS)
        right = reference.finish_forward(payload, x, v, v, *share, eps=VAR_EPS, axis=AXIS)
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    for payload in (sums.float(), wide(10, 2)[:, 0]):
        about: Any = payload, dy, x, v, var, v, v, 0.5
        dx, _ = verbs.finish_backward(*about, eps=VAR_EPS, axis=AXIS)
        assert torch.equal(dx, reference.finish_backward(*about, eps=VAR_EPS, axis=AXIS)[0])
    assert launched == []


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in of CuPy whose current stream is 13; `used` has the streams of all exchanges."""
    streams, used = ["torch's"], []

    class ndarray(np.ndarray):
        def __dlpack_device__(self) -> Any:
            return 2, 0  # kDLCUDA

        def __dlpack__(self, *, stream: Any, **_: Any) -> Any:  # type: ignore[override]
            used.append(stream)
            return super().__dlpack__()

    @contextlib.contextmanager
    def in_stream(ptr: Any) -> Iterator[None]:
        streams.append(ptr)
        yield
        streams.pop()

    def from_dlpack(x: Any) -> Any:
        used.append(streams[-1])
        return x.numpy().view(ndarray)

    module: Any = ModuleType("cupy")
    module.ndarray, module.from_dlpack, module.used = ndarray, from_dlpack, used
    module.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=13))
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr: ptr)
    monkeypatch.setattr(torch.cuda, "stream", in_stream)
    of_torch: Any = lambda device: SimpleNamespace(cuda_stream=streams[-1])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", of_torch)
    kernels._native.cache_clear()
    yield module
    kernels._native.cache_clear()
    sys.modules.pop("multibn.kernels.cupy", None)
    assert streams == ["torch's"]


@pytest.mark.skipif(DEVICE != "cpu", reason="the stand-in is for machines without CuPy")
@layouts
def test_cupy_arrays(layout: str, cupy: Any, launched: list[str]) -> None:
    """By the same kernels: in CuPy's stream, with its strides, and alive between the halves."""

    def given(x: Any) -> Any:
        return x.numpy().copy(order="K").view(cupy.ndarray)

    x, dy = (normal(3, 5, 4, 6, layout=layout) for _ in range(2))
    weight, mean = wide(5).float(), wide(5).float()
    i, mine = (
        Input(of(x), of(weight), None, 1e-5, AXIS, running=Running(of(mean), of(mean**2), 0.1))
        for of in (given, torch.clone)
    )
    gradient = given(dy)
    file, alive = kernels.select(i.x), ref(gradient)
    assert file.__name__ == "multibn.kernels.cupy"
    y, batch, state = file.finish_forward(i, file.begin_forward(i, 72.0, 72.0), 72.0, 72.0)
    g = Gradient(gradient, i, batch)
    summed, dweight, _, begun = file.begin_backward(g)
    del gradient
    g = g._replace(dy=None)  # `begun` has it
    assert alive() is not None
    dx, _ = file.finish_backward(g, summed, begun)
    del begun
    gc.collect()  # the interpreter has circles
    assert alive() is None
    right, about, _ = generic.finish_forward(
        mine, generic.begin_forward(mine, 72.0, 72.0), 72.0, 72.0
    )
    g = Gradient(dy, mine, about)
    sums, right_dweight, _, *_ = generic.begin_backward(g)
    right_dx, _ = generic.finish_backward(g, sums)
    got = y, *batch, dweight, dx, *i.running[:2]
    expected = right, *about, right_dweight, right_dx, *mine.running[:2]
    for a, b in zip(got, expected, strict=True):
        assert type(a) is cupy.ndarray
        assert [n // a.itemsize for n in a.strides] == list(b.stride())
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5)
    assert state == generic.RIGHT
    assert launched == [
        "moments", "merge_moments", "finish_forward", "normalize",
        "backward_sums", "merge_sums", "input_gradient",
    ]  # fmt: skip
    assert set(cupy.used) == {13}


@on_gpu
def test_capture_in_a_graph() -> None:
    x, weight = normal(8, 16, 14, 14), wide(16).half()

    def passes() -> list[Any]:
        packed = verbs.begin_forward(x, 7.0, 7.0, axis=AXIS)
        mean, var = local_moments(x)
        given: dict[str, Any] = {"eps": VAR_EPS, "axis": AXIS}
        y = verbs.normalize(x, mean, var, weight, None, **given)
        sums = backward_sums(y, x, mean, var, VAR_EPS)
        dx = input_gradient(y, x, mean, var, weight, packed[-1:].view(()), *sums, **given)
        return [packed, mean, var, y, *sums, dx]

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
    mean, _ = local_moments(x)
    close(mean.cpu(), torch.tensor([1, 1, 1 + 2 / 2**30], dtype=torch.float64), 1e-12)
    y = verbs.normalize(x, 0 * mean, 0 * mean + 0.25, None, None, eps=0.0, axis=AXIS)
    assert y[-1, -1, -1].item() == 6
