"""The compiled kernels of host memory: every layout, dtype and number of threads."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.helpers import require
from tests.helpers.launch import ROOT

require.need("numba")

from multibn import kernels as selection  # noqa: E402
from multibn.kernels import generic, host  # noqa: E402

# Long planes and short ones, more columns than a tile has, several samples in a tile, few rows and
# many, one channel, one sample, one element.
SHAPES = [
    (3, 5, 13, 11),
    (2, 70, 7, 7),
    (37, 3, 2, 2),
    (19, 2100, 1, 1),
    (5, 1, 1, 300),
    (1, 4, 6, 1),
    (1, 1, 1, 1),
]
RTOL = {np.dtype("float32"): 1e-5, np.dtype("float64"): 1e-11, np.dtype("float16"): 1e-2}


def passes(kernels: Any, dy: Any, x: Any, c: list[Any], axis: tuple[int, ...]) -> list[Any]:
    """The results of all four."""
    return [
        *kernels.local_moments(x, axis=axis),
        kernels.normalize(x, *c[:3], axis=axis),
        *kernels.backward_sums(dy, x, c[0], axis=axis),
        kernels.input_gradient(dy, x, *c, axis=axis),
    ]


def exact(dy: Any, x: Any, c: list[Any], axis: tuple[int, ...]) -> list[Any]:
    """As `passes`, by their definition in float64."""
    dy, x = dy.astype("float64"), x.astype("float64")
    mean, a, b, d = (np.expand_dims(v, axis) for v in c)
    sums = dy.sum(axis), (dy * (x - mean)).sum(axis)
    return [
        x.mean(axis), x.var(axis), (x - mean) * a + b, *sums, (x - mean) * b + dy * a + d
    ]  # fmt: skip


def check(dy: Any, x: Any, axis: tuple[int, ...] = (0, 2, 3)) -> list[Any]:
    rng = np.random.default_rng(1)
    c = list(rng.normal(1, 1, (4, *(n for i, n in enumerate(x.shape) if i not in axis))))
    got = passes(host, dy, x, c, axis)
    for value, right in zip(got, exact(dy, x, c, axis), strict=True):
        assert value.shape == right.shape
        scale = max(np.abs(right).max(initial=0.0), 1e-30) * RTOL[x.dtype]
        np.testing.assert_allclose(value, right, rtol=RTOL[x.dtype], atol=scale)
    assert got[2].dtype == got[5].dtype == x.dtype
    assert {a.dtype for a in (got[0], got[1], got[3], got[4])} == {np.dtype("float64")}
    return got


def data(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(3, 2, shape).astype(dtype)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the generic kernels were used")


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("local_moments", "normalize", "backward_sums", "input_gradient"):
        monkeypatch.setattr(generic, name, refuse)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_layouts_and_dtypes(shape: tuple[int, ...], dtype: str) -> None:
    x, dy = data(shape, dtype), data(shape, dtype, 1)
    check(dy, x)
    last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    got = check(dy, last)  # `dy` is in another order
    # Those of axes of one element mean nothing.
    y, dx, like = (np.squeeze(a).strides for a in (got[2], got[5], last))
    assert y == dx == like


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    "shape, axis",
    [
        ((6, 5), (0,)),
        ((6, 5), (1,)),
        ((6,), ()),
        ((4, 3, 5), (0,)),
        ((4, 3, 5), (0, 1)),
        ((4, 3, 5), (2,)),
        ((4, 2, 3, 5, 6), (0, 3, 4)),
        ((4, 3, 2, 5, 6), (0, 2, 3, 4)),
    ],
    ids=str,
)
def test_axes(shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    check(data(shape), data(shape, seed=1), axis)


@pytest.mark.parametrize(
    "shape, axis", [((4, 3, 5), (1,)), ((2, 4, 3, 5), (1, 3)), ((4, 3, 5, 6), (0, 2))], ids=str
)
def test_other_axes_are_done_by_the_generic_kernels(
    shape: tuple[int, ...], axis: tuple[int, ...]
) -> None:
    check(data(shape), data(shape, seed=1), axis)
    # Channels that memory has in another order than the shape.
    check(data((4, 5, 3)), data((4, 3, 5)).transpose(0, 2, 1), (0,))
    check(data((6,)), data((6,)), (0,))  # per-channel values that are no arrays


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[:, 1:4],
        lambda a: a[..., ::-1],
        lambda a: a[::-1, ::-1],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.broadcast_to(a[..., :1], a.shape),
        lambda a: a.transpose(0, 1, 3, 2),
    ],
    ids=["rows", "channels", "mirrored", "reversed", "batch", "column", "transposed"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strides(view: Any, dtype: str) -> None:
    x, dy = view(data((4, 5, 6, 7), dtype)), view(data((4, 5, 6, 7), dtype, 1))
    x.flags.writeable = False
    check(dy, x)
    check(dy, x.copy())
    check(dy.copy(), x)


def test_what_the_loops_cannot_take() -> None:
    x = data((4, 3, 2, 2))
    c = list(np.random.default_rng(1).normal(1, 1, (4, 3)))
    axis = (0, 2, 3)
    right = passes(host, x, x, c, axis)
    for dy, other in (
        (x.astype(">f4"), x.astype(">f4")),
        (x, x.view(type("Special", (np.ndarray,), {}))),
        (x, np.frombuffer(b"0" + x.tobytes(), "u1")[1:].view(x.dtype).reshape(x.shape)),
        (x.astype("float64"), x),
    ):
        for got, expected in zip(passes(host, dy, other, c, axis), right, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        assert host.normalize(other, *c[:3], axis=axis).dtype == other.dtype
    with pytest.raises(ValueError, match="reshape"):
        host.normalize(x, *[v[:2] for v in c[:3]], axis=axis)
    # Coefficients of another dtype or stride.
    strided = [np.repeat(v, 2)[::2] for v in c]
    np.testing.assert_array_equal(host.normalize(x, *strided[:3], axis=axis), right[2])
    narrow = [v.astype("float32") for v in c]
    np.testing.assert_allclose(host.normalize(x, *narrow[:3], axis=axis), right[2], rtol=1e-4)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 2), (2, 0, 3, 2)], ids=str)
def test_nothing_gives_zeros(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, "float32")
    c = [np.ones(shape[1])] * 4
    for got in passes(host, x, x, c, (0, 2, 3)):
        assert got.shape in (shape, shape[1:2])
        assert not got.any()


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_not_finite_stays_in_its_channel(
    shape: tuple[int, ...], bad: float, where: int, channels_last: bool
) -> None:
    x = data(shape)
    if channels_last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    clean = host.local_moments(x, axis=(0, 2, 3))
    sums = host.backward_sums(x, x, np.ones(shape[1]), axis=(0, 2, 3))
    x[where, 1, where, where] = bad
    found = host.local_moments(x, axis=(0, 2, 3))
    for got, before in zip(
        (*found, *host.backward_sums(x, x, np.ones(shape[1]), axis=(0, 2, 3))),
        (*clean, *sums),
        strict=True,
    ):
        assert not np.isfinite(got[1])
        np.testing.assert_array_equal(np.delete(got, 1), np.delete(before, 1))
    assert np.isnan(found[1][1])
    y = host.normalize(x, *[np.ones(shape[1])] * 3, axis=(0, 2, 3))
    assert (~np.isfinite(y)).sum() == 1


@pytest.mark.parametrize("shape", [(64, 300, 7, 7), (6, 50, 28, 28), (5000, 40, 1, 1)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6])
def test_variance_keeps_the_digits_of_its_input(shape: tuple[int, ...], mean: float) -> None:
    x = (mean + np.random.default_rng(0).normal(size=shape)).astype("float32")
    got = host.local_moments(x, axis=(0, 2, 3))
    exact = x.astype("float64")
    np.testing.assert_allclose(got[0], exact.mean((0, 2, 3)), rtol=1e-14, atol=1e-7)
    np.testing.assert_allclose(got[1], exact.var((0, 2, 3)), rtol=1e-6)
    got = host.local_moments(exact, axis=(0, 2, 3))
    np.testing.assert_allclose(got[0], exact.mean((0, 2, 3)), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(got[1], exact.var((0, 2, 3)), rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_has_no_variance_in_any_layout(shape: tuple[int, ...], dtype: str) -> None:
    x = np.full(shape, 0.1, dtype)
    for like in (x, np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)):
        mean, var = host.local_moments(like, axis=(0, 2, 3))
        assert (var == 0).all()
        assert (mean == x.flat[0]).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_what_rounding_leaves_of_the_mean_is_not_lost(shape: tuple[int, ...]) -> None:
    """In float32 a mean near 1e4 is off by up to 5e-4 of these standard deviations."""
    C = shape[1]
    mean = 1e4 + np.linspace(0.0001, 0.0009, C)
    x = (1e4 + np.random.default_rng(0).normal(size=shape)).astype("float32")
    ones, zeros = np.ones(C), np.zeros(C)
    right = x.astype("float64") - mean[:, None, None]
    axis = (0, 2, 3)
    y = host.normalize(x, mean, ones, zeros, axis=axis)
    np.testing.assert_allclose(y, right, rtol=0, atol=2e-6)
    dx = host.input_gradient(x, x, mean, zeros, ones, zeros, axis=axis)
    np.testing.assert_allclose(dx, right, rtol=0, atol=2e-6)
    sums = host.backward_sums(np.ones_like(x), x, mean, axis=axis)
    np.testing.assert_allclose(sums[1], right.sum(axis), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(400, 2, 5, 5), (10, 2, 32, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_values_far_from_the_mean(shape: tuple[int, ...], dtype: str) -> None:
    """The worst that the moments' centre can be; one channel's is good."""
    x = (1e4 + np.random.default_rng(0).normal(size=shape)).astype(dtype)
    x[0, 0].flat[:8] += 300
    for like in (x, np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)):
        exact = x.astype("float64").var((0, 2, 3))
        rtol = 1e-6 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(host.local_moments(like, axis=(0, 2, 3))[1], exact, rtol=rtol)


class Threads:
    """Threads as OMP_NUM_THREADS or torch set them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._torch = sys.modules.get("torch")
        self._before = self._torch.get_num_threads() if self._torch else 0

    def set(self, n: int) -> None:
        self._monkeypatch.setenv("OMP_NUM_THREADS", str(n))
        if self._torch:
            self._torch.set_num_threads(n)

    def restore(self) -> None:
        if self._torch:
            self._torch.set_num_threads(self._before)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    setting = Threads(monkeypatch)
    yield setting
    setting.restore()


@pytest.mark.parametrize("shape", [(3, 64, 64, 64), (40, 2048, 3, 3), (20000, 40, 1, 1)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    shape: tuple[int, ...], threads: Threads
) -> None:
    x, dy = data(shape), data(shape, seed=1)
    c = list(np.random.default_rng(1).normal(1, 1, (4, shape[1])))
    found = []
    for n in (1, 2, 3):
        threads.set(n)
        found.append(passes(host, dy, x, c, (0, 2, 3)))
    for one, two, three in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


def test_several_threads_may_call_at_once(threads: Threads) -> None:
    """Ranks that are threads, and autograd's."""
    threads.set(2)
    x = data((3, 64, 64, 64))
    right = host.local_moments(x, axis=(0, 2, 3))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: host.local_moments(x, axis=(0, 2, 3)), range(12)):
            np.testing.assert_array_equal(got, right)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_threads_after_a_fork() -> None:
    code = """
import multiprocessing, numpy as np
from multibn.kernels import local_moments
x = np.ones((3, 64, 64, 64), "float32")
def work(_):
    return float(local_moments(x, axis=(0, 2, 3))[0][0])
assert work(0) == 1
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map_async(work, [0]).get(60))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, "[1.0]"), ran.stderr


@pytest.mark.parametrize(
    "environment, used",
    [
        # numba looks for a directory in one place only, and finds none.
        (
            {
                "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
                "NUMBA_CACHE_DIR": os.devnull,
            },
            True,
        ),
        ({"NUMBA_DISABLE_JIT": "1"}, False),
    ],
    ids=["no cache", "no compiler"],
)
def test_numba_is_imported_at_first_use(environment: dict[str, str], used: bool) -> None:
    code = """
import sys, numpy as np
from multibn import kernels
assert "numba" not in sys.modules
mean, _ = kernels.local_moments(np.ones((2, 3, 4, 4), "float32"), axis=(0, 2, 3))
print(mean, "multibn.kernels.host" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=100, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, f"[1. 1. 1.] {used}"), ran.stderr


def test_torch() -> None:
    require.need("torch")
    import torch

    x, dy = (torch.from_numpy(data((4, 5, 6, 7), seed=i)) for i in (0, 1))
    c = list(torch.from_numpy(np.random.default_rng(1).normal(1, 1, (4, 5))))
    axis = (0, 2, 3)
    right = passes(host, dy.numpy(), x.numpy(), [v.numpy() for v in c], axis)
    same = [
        lambda a: a,
        lambda a: a.to(memory_format=torch.channels_last),
        lambda a: a.repeat(1, 2, 1, 1)[:, :5],
        lambda a: torch.nn.Parameter(a).detach(),
        lambda a: torch._neg_view(-a),
    ]
    for one, other in itertools.product(same, same):
        got = passes(host, one(dy), other(x), c, axis)
        assert all(type(a) is torch.Tensor for a in got)
        for value, expected in zip(got, right, strict=True):
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-5)
    expanded = torch.ones(()).expand(x.shape)  # what `y.sum().backward()` hands on
    for value, expected in zip(
        passes(host, expanded, x, c, axis),
        passes(host, np.ones(x.shape, "float32"), x.numpy(), [v.numpy() for v in c], axis),
        strict=True,
    ):
        np.testing.assert_array_equal(value.numpy(), expected)
    for dtype in (torch.float16, torch.bfloat16):
        for value, expected in zip(
            passes(host, dy.to(dtype), x.to(dtype), c, axis),
            passes(generic, dy.to(dtype), x.to(dtype), c, axis),
            strict=True,
        ):
            assert value.dtype == expected.dtype
            torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-2)


def test_tensors_without_memory_of_their_own() -> None:
    require.need("torch")
    import torch

    x = torch.from_numpy(data((4, 5, 6, 7)))
    c = torch.ones(5, dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        mean, var = selection.local_moments(x, axis=(0, 2, 3))
        return selection.normalize(x, mean, c, var, axis=(0, 2, 3)).square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad)
