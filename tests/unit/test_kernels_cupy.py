"""CuPy's kernels, compiled for the host: their numbers are those of `generic` in float64."""

import shutil
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.cupy_verbs import step
from multibn._environment import importable
from multibn.kernels import Running, generic
from tests.helpers import standin_cuda
from tests.helpers.passes import Verbs

EPS = {"float64": 1e-13, "float32": 1e-6, "float16": 2e-3}
AXIS = (0, 2, 3)
VAR_EPS = 0.1

if importable("cupy") or not shutil.which("g++"):
    pytest.skip("the stand-in is for g++, and for machines without CuPy", allow_module_level=True)


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    if not hasattr(np, "astype"):
        pytest.skip("CuPy has functions that NumPy, which stands for CuPy, has from 2.1 on")
    with standin_cuda.installed() as file:
        yield file


@pytest.fixture
def launches() -> list[str]:
    standin_cuda.RawModule.launches.clear()
    return standin_cuda.RawModule.launches


def normal(
    *shape: int, dtype: str = "float32", last: bool = False, seed: int = 0, mean: float = 0.0
) -> Any:
    """Channel c has mean c and standard deviation 1 + c; with `last`, channels come last."""
    c = np.arange(shape[1]).reshape(-1, *[1] * (len(shape) - 2))
    x = (np.random.default_rng(seed).standard_normal(shape) * (1 + c) + c + mean).astype(dtype)
    if last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    return x.view(standin_cuda.ndarray)


def compare(
    file: Any, x: Any, dy: Any, dtype: str | None = "float32", axis: Any = AXIS, **options: Any
) -> None:
    got = step(file, x, dy, dtype, axis, **options)
    wide = {k: np.asarray(v, "f8") if k == "residual" else v for k, v in options.items()}
    right = step(generic, np.asarray(x, "f8"), np.asarray(dy, "f8"), dtype, axis, **wide)
    for name, expected in right.items():
        v = got[name]
        if expected is None:
            assert v is None
            continue
        assert v.shape == expected.shape
        rounded = name in ("y", "known", "dx", "dresidual")
        if rounded:
            assert (v.dtype, v.strides) == (x.dtype, np.empty_like(x).strides)
        else:
            assert v.dtype == expected.dtype
        # Sums about another value than generic's cancel less; float32 parameters round.
        eps = EPS[x.dtype.name] if rounded else 1e-6 if v.dtype == np.float32 else 1e-12
        scale = np.abs(expected).max() + (name in ("sums", "dweight", "dbias")) * x.size
        np.testing.assert_allclose(np.asarray(v, "f8"), expected, rtol=0, atol=eps * scale)


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("last", [False, True])
def test_dtypes_and_layouts(cupy: Any, dtype: str, last: bool, launches: list[str]) -> None:
    x, dy = (normal(3, 5, 4, 7, dtype=dtype, last=last, seed=n) for n in range(2))
    compare(cupy, x, dy)
    assert launches == [
        "moments", "pack", "unpack", "normalize", "backward_sums", "pack_sums",
        "coefficients", "input_gradient", "coefficients", "normalize",
    ]  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("has_residual, relu", [(False, True), (True, True), (True, False)])
def test_residual_and_relu(cupy: Any, last: bool, has_residual: bool, relu: bool) -> None:
    x, dy, residual = (normal(3, 5, 4, 7, last=last, seed=n) for n in range(3))
    options: Any = {"residual": residual} if has_residual else {}
    if has_residual and not relu:  # the output is of no use to the backward pass
        got, right = (
            Verbs(file).finish_forward(
                Verbs(file).begin_forward(x, 84.0, 84.0, axis=AXIS), x, None, None, 84.0, 84.0,
                eps=VAR_EPS, axis=AXIS, **options,
            )[0]
            for file in (cupy, generic)
        )  # fmt: skip
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)
    else:
        compare(cupy, x, dy, relu=relu, **options)


def test_shapes_parameters_and_several_blocks(cupy: Any, launches: list[str]) -> None:
    for shape, dtype in product([(6, 40), (3, 2, 250)], (None, "float64")):
        axis = tuple(i for i in range(len(shape)) if i != 1)
        compare(cupy, normal(*shape), normal(*shape, seed=1), dtype, axis)
    compare(cupy, normal(20, 40, 3, 3, last=True), normal(20, 40, 3, 3, seed=1))
    assert len(launches) == 10 * 5
    plan = cupy.plan_of(normal(20, 40, 3, 3, last=True), AXIS)
    assert plan.splits > 1
    assert plan.split_grid[0] > 1
    assert cupy.plan_of(normal(3, 2, 250), (0, 2)).splits > 1


def test_two_channel_axes_and_another_memory_order(cupy: Any, launches: list[str]) -> None:
    x, dy = (normal(4, 6, 5, seed=n).reshape(4, 2, 3, 5) for n in range(2))
    compare(cupy, x, dy, axis=(0, 3))
    compare(cupy, normal(3, 5, 4, 7), normal(3, 5, 4, 7, last=True, seed=1))
    assert len(launches) == 20


def test_a_large_mean_and_constants(cupy: Any) -> None:
    x, dy = normal(8, 3, 4, 7, mean=1e4), normal(8, 3, 4, 7, seed=1)
    compare(cupy, x, dy, None)
    values = np.random.default_rng(0).standard_normal((1, 5, 1, 1))
    x = np.ascontiguousarray(np.broadcast_to(values, (3, 5, 2, 4))).view(standin_cuda.ndarray)
    sent = Verbs(cupy).begin_forward(x, 4.0, 24.0, axis=AXIS)
    _, _, var, *_ = Verbs(cupy).finish_forward(
        2 * sent, x, None, None, 4.0, 24.0, eps=0.1, axis=AXIS
    )
    assert not var.any()


@pytest.mark.parametrize("convention", ["unbiased_global", "unbiased_local", "biased"])
@pytest.mark.parametrize("count", [0.0, 1.0, 7.0])
def test_running_statistics(cupy: Any, convention: Any, count: float, launches: list[str]) -> None:
    x = normal(3, 5, 2, 2)
    sent = (
        Verbs(generic)
        .begin_forward(x, min(count, 1.0), count, axis=AXIS)
        .view(standin_cuda.ndarray)
    )
    found = []
    for file in (cupy, generic):
        mean, var, n = (np.array(v).view(standin_cuda.ndarray) for v in ([0.5] * 5, [2.0] * 5, 4))
        running = Running(mean, var, 0.3, convention, n)
        arguments = sent, x, None, None, 1.0, 5.0
        Verbs(file).finish_forward(*arguments, eps=0.1, axis=AXIS, running=running)
        found.append([running.mean, running.var, running.num_batches])
    for got, right in zip(*found, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-14)
    assert launches == ["unpack", "normalize"]


def test_running_statistics_that_generic_moves(cupy: Any, launches: list[str]) -> None:
    """A cumulative average; two dtypes; a counter of another library."""
    x = normal(3, 5, 2, 2)
    sent = Verbs(cupy).begin_forward(x, 12.0, 12.0, axis=AXIS)
    for momentum, dtype, counter in ((None, "f8", x), (0.1, "f4", x), (0.1, "f8", np.array(0))):
        found = []
        for file in (cupy, generic):
            n = np.array(4).view(type(counter))
            mean, var = (v.view(type(x)) for v in (np.zeros(5), np.ones(5, dtype)))
            running = Running(mean, var, momentum, num_batches=n)
            arguments = sent, x, None, None, 12.0, 12.0
            Verbs(file).finish_forward(*arguments, eps=0.1, axis=AXIS, running=running)
            found.append(running[:2] + running[4:])
        for got, right in zip(*found, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-6)
    assert launches == ["moments", "pack"] + 3 * ["unpack", "normalize"]


def test_invalid_values_are_not_hidden(cupy: Any) -> None:
    x = normal(3, 2, 4, 4)
    x[1, 1, 2, 2] = np.nan
    sent = Verbs(cupy).begin_forward(x, 1.0, 1.0, axis=AXIS)
    assert np.isnan(sent).tolist() == [False, True, False, True, False, False]
    one = np.ones(2).view(standin_cuda.ndarray)
    y = Verbs(cupy).normalize(x, one, one, None, None, eps=0.1, axis=AXIS, relu=True)
    assert np.isnan(y).sum() == 1
    sums, *_ = Verbs(cupy).begin_backward(x, x, one, one, None, None, eps=0.1, axis=AXIS)
    assert np.isnan(sums).tolist() == [False, True, False, True]


def test_what_is_left_to_generic(cupy: Any, launches: list[str]) -> None:
    x, dy = normal(3, 2, 8, 5)[:, :, ::2], normal(3, 2, 8, 5, seed=1)[:, :, ::2]
    got, right = (step(file, x, dy, "float32") for file in (cupy, generic))
    for name, expected in right.items():
        np.testing.assert_array_equal(got[name], expected)
    empty = normal(0, 2, 4, 5)
    assert Verbs(cupy).begin_forward(empty, 0.0, 0.0, axis=AXIS).tolist() == [0] * 6
    mask = np.ones((3, 1, 4, 5), bool).view(standin_cuda.ndarray)
    x = normal(3, 2, 4, 5)
    Verbs(cupy).begin_forward(x, 60.0, np.array(60.0), axis=AXIS, mask=mask)
    assert launches == []
