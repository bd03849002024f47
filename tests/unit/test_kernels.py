"""Accuracy and dtypes of the four passes."""

import importlib
from typing import Any

import numpy as np
import pytest

from multibn.kernels import generic
from tests.helpers import require

AXIS = (0, 2, 3)


@pytest.fixture(params=["generic", "host"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "host":
        require.need("numba")
    return importlib.import_module(f"multibn.kernels.{request.param}")


def moments(kernels: Any, x: Any) -> tuple[Any, Any]:
    mean, var = kernels.local_moments(x, axis=AXIS)
    return np.asarray(mean), np.asarray(var)


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_large_planes_in_torch(kernels: Any, memory_format: str, mean: float) -> None:
    """torch's own batch norm has an error of 1e-3 to 280 here, in channels_last."""
    require.need("torch")
    import torch

    generator = torch.Generator().manual_seed(0)
    x = (mean + torch.randn(8, 16, 512, 512, generator=generator)).to(
        memory_format=getattr(torch, memory_format)
    )
    got_mean, got_var = moments(kernels, x)
    exact = x.double()
    np.testing.assert_allclose(got_mean, exact.mean(AXIS), rtol=0, atol=1e-6)
    np.testing.assert_allclose(got_var, exact.var(AXIS, unbiased=False), rtol=1e-6)


@pytest.mark.parametrize("layout", ["C", "F"])
def test_long_columns_in_numpy(kernels: Any, layout: Any) -> None:
    """A million values along an outer axis, where NumPy adds one by one."""
    x = np.random.default_rng(0).normal(3, 1, (1 << 20, 4, 1, 1)).astype("float32", order=layout)
    got_mean, got_var = moments(kernels, x)
    np.testing.assert_allclose(got_mean, x.mean(AXIS, dtype="float64"), rtol=1e-9)
    np.testing.assert_allclose(got_var, x.var(AXIS, dtype="float64"), rtol=1e-7)


@pytest.mark.parametrize("scale", [1e-18, 1e-4, 1e15])
def test_small_and_large_variances(kernels: Any, scale: float) -> None:
    x = (np.random.default_rng(0).normal(size=(64, 2, 3, 3)) * scale).astype("float32")
    np.testing.assert_allclose(moments(kernels, x)[1], x.astype("float64").var(AXIS), rtol=1e-5)


def test_a_constant_has_no_variance(kernels: Any) -> None:
    mean, var = moments(kernels, np.full((5, 2, 3, 3), 0.1, "float32"))
    assert (var == 0).all()
    np.testing.assert_array_equal(mean, np.float32(0.1).astype("float64"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_computed_in_float32(kernels: Any, dtype: str) -> None:
    """Squares above 65504 and counts above 2048 are nothing special."""
    require.need("torch")
    import torch

    x = (300 + torch.randn(16, 2, 32, 32, generator=torch.Generator().manual_seed(0))).to(
        getattr(torch, dtype)
    )
    exact = x.double()
    got_mean, got_var = kernels.local_moments(x, axis=AXIS)
    assert got_mean.dtype == got_var.dtype == torch.float64
    np.testing.assert_allclose(got_mean, exact.mean(AXIS), rtol=1e-7)
    np.testing.assert_allclose(got_var, exact.var(AXIS, unbiased=False), rtol=1e-5)
    y = kernels.normalize(x, got_mean, got_var**-0.5, 0 * got_mean, axis=AXIS)
    dx = kernels.input_gradient(y, x, got_mean, got_var, got_var, got_var, axis=AXIS)
    sums = kernels.backward_sums(y, x, got_mean, axis=AXIS)
    assert y.dtype == dx.dtype == x.dtype
    assert sums[0].dtype == torch.float64


def test_memory_format_is_kept(kernels: Any) -> None:
    require.need("torch")
    import torch

    for memory_format, shape in (
        (torch.channels_last, (2, 3, 4, 5)),
        (torch.channels_last_3d, (2, 3, 4, 5, 6)),
    ):
        x = torch.randn(shape).to(memory_format=memory_format)
        axis = tuple(i for i in range(x.ndim) if i != 1)
        c = torch.ones(3, dtype=torch.float64)
        assert kernels.normalize(x, c, c, c, axis=axis).is_contiguous(memory_format=memory_format)
        dx = kernels.input_gradient(torch.ones(shape), x, c, c, c, c, axis=axis)
        assert dx.is_contiguous(memory_format=memory_format)


def test_a_device_without_float64_uses_the_host() -> None:
    strict = pytest.importorskip("array_api_strict")
    device = strict.Device("no_float64")
    data = np.random.default_rng(0).normal(1000, 1, (8, 3, 4, 4)).astype("float32")
    x = strict.asarray(data, device=device)
    mean, var = generic.local_moments(x, axis=AXIS)
    assert mean.dtype == strict.float64
    assert mean.device != device
    np.testing.assert_allclose(np.asarray(var), data.astype("float64").var(AXIS), rtol=1e-5)
    y = generic.normalize(x, mean, var**-0.5, 0.0 * mean, axis=AXIS)
    assert y.device == device
    assert y.dtype == strict.float32
    sum_dy, sum_dy_xmu = generic.backward_sums(y, x, mean, axis=AXIS)
    assert sum_dy.dtype == sum_dy_xmu.dtype == strict.float64
    np.testing.assert_allclose(np.asarray(sum_dy), 0, atol=1e-3)


def test_the_argument_is_left_unchanged(kernels: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4))
    before = x.copy()
    c = np.ones(3)
    kernels.local_moments(x, axis=AXIS)
    kernels.normalize(x, c, c, c, axis=AXIS)
    kernels.backward_sums(x, x, c, axis=AXIS)
    kernels.input_gradient(x, x, c, c, c, c, axis=AXIS)
    np.testing.assert_array_equal(x, before)
