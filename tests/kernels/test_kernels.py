"""Accuracy and dtypes of the passes."""

import importlib
from typing import Any

import numpy as np
import pytest

from multibn.kernels import _native
from multibn.kernels import generic as reference
from tests.helpers import require
from tests.kernels.passes import Verbs, libraries

generic = Verbs(reference)

AXIS = (0, 2, 3)


@pytest.fixture(params=["generic", "host"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "host":
        require.need("core")
    return Verbs(importlib.import_module(f"multibn.kernels.{request.param}"))


def moments(kernels: Any, x: Any) -> tuple[Any, Any]:
    mean, var = kernels.local_moments(x, axis=AXIS)
    return np.asarray(mean), np.asarray(var)


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_large_planes_in_torch_keep_their_digits(
    kernels: Any, memory_format: str, mean: float
) -> None:
    """torch's own batch norm has an error of 1e-3 to 280 here, in channels_last."""
    require.need("torch")
    import torch

    generator = torch.Generator().manual_seed(0)
    x = (mean + torch.randn(8, 4, 512, 512, generator=generator)).to(
        memory_format=getattr(torch, memory_format)
    )
    got_mean, got_var = moments(kernels, x)
    exact = x.double()
    np.testing.assert_allclose(got_mean, exact.mean(AXIS), rtol=0, atol=1e-6)
    np.testing.assert_allclose(got_var, exact.var(AXIS, unbiased=False), rtol=1e-6)


@pytest.mark.parametrize("layout", ["C", "F"])
def test_long_columns_in_numpy_keep_their_digits(kernels: Any, layout: Any) -> None:
    """A million values along an outer axis, where NumPy adds one by one."""
    x = np.random.default_rng(0).normal(3, 1, (1 << 20, 4, 1, 1)).astype("float32", order=layout)
    got_mean, got_var = moments(kernels, x)
    np.testing.assert_allclose(got_mean, x.mean(AXIS, dtype="float64"), rtol=1e-9)
    np.testing.assert_allclose(got_var, x.var(AXIS, dtype="float64"), rtol=1e-7)


@pytest.mark.parametrize("scale", [1e-18, 1e-4, 1e15])
def test_small_and_large_variances_keep_their_digits(kernels: Any, scale: float) -> None:
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
    packed = np.asarray(kernels.begin_forward(x, 2.0, 3.0, axis=AXIS))
    meansqr = (exact * exact).mean(AXIS)
    np.testing.assert_allclose(packed, 2 * np.r_[exact.mean(AXIS), meansqr, 1, 1.5], rtol=1e-7)

    of_batch = (got_mean, got_var)
    std = exact.std(AXIS, unbiased=False, keepdim=True)
    xhat = (exact - exact.mean(AXIS, keepdim=True)) / std
    y = kernels.normalize(x, *of_batch, None, None, eps=0.0, axis=AXIS)
    sums = kernels.backward_sums(y, x, *of_batch, eps=0.0, axis=AXIS)
    dx = kernels.input_gradient(y, x, *of_batch, None, 0.5 / 16384, *sums, eps=0.0, axis=AXIS)
    assert y.dtype == dx.dtype == x.dtype
    assert sums[0].dtype == sums[1].dtype == torch.float64
    rtol = torch.finfo(x.dtype).eps
    np.testing.assert_allclose(y.double(), xhat, rtol=rtol, atol=1e-5)
    np.testing.assert_allclose(sums[0], y.double().sum(AXIS), rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(sums[1], (y.double() * xhat).sum(AXIS), rtol=1e-5)
    pull = 0.5 / 16384 * (sums[0].view(2, 1, 1) + xhat * sums[1].view(2, 1, 1))
    np.testing.assert_allclose(dx.double(), (y.double() - pull) / std, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("weight, count", [(0.0, 0.0), (2.5, 7.0), (3e9, 4e9)])
@libraries
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_packed_moments_are_weighted_local_moments(
    kernels: Any, of: Any, weight: float, count: float, mean: float
) -> None:
    x = np.random.default_rng(0).normal(mean, 2, (6, 5, 7, 4)).astype("float32")
    given = of(x)
    packed = kernels.begin_forward(given, weight, count, axis=AXIS)
    assert type(packed) is type(given)
    packed = np.asarray(packed)
    assert (packed.dtype, packed.shape) == ("float64", (12,))
    exact = x.astype("float64")
    right = weight * np.r_[exact.mean(AXIS), (exact * exact).mean(AXIS)]
    atol = weight * np.repeat([1e-6, 4e-6 + 2e-6 * mean], 5)
    assert (abs(packed[:-2] - right) <= atol).all()
    assert (packed[-2:] == (weight, count)).all()


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 2), (2, 0, 3, 2)], ids=str)
@libraries
def test_packed_moments_of_nothing_are_zeros(kernels: Any, of: Any, shape: tuple[int, ...]) -> None:
    x = of(np.zeros(shape, "float32"))
    for weight, count in ((0.0, 0.0), (1.0, np.nan)):  # a rank that is empty, one that refuses
        packed = kernels.begin_forward(x, weight, count, axis=AXIS)
        assert type(packed) is type(x)
        np.testing.assert_array_equal(packed, [0.0] * 2 * shape[1] + [weight, count])


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
        for parameter in (c, None):
            y = kernels.normalize(x, c, c, parameter, parameter, eps=0.0, axis=axis)
            assert y.is_contiguous(memory_format=memory_format)
            dy = torch.ones(shape)
            dx = kernels.input_gradient(dy, x, c, c, parameter, 1.0, c, c, eps=0.0, axis=axis)
            assert dx.is_contiguous(memory_format=memory_format)


def test_a_device_without_float64_uses_the_host() -> None:
    strict = pytest.importorskip("array_api_strict")
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("array-api-strict moves arrays between devices with NumPy 2 only")
    device = strict.Device("no_float64")
    data = np.random.default_rng(0).normal(1000, 1, (8, 3, 4, 4)).astype("float32")
    x = strict.asarray(data, device=device)
    of_batch = mean, var = generic.local_moments(x, axis=AXIS)
    assert mean.dtype == strict.float64
    assert mean.device != device
    exact = data.astype("float64")
    np.testing.assert_allclose(np.asarray(var), exact.var(AXIS), rtol=1e-5)
    packed = generic.begin_forward(x, 2.0, 3.0, axis=AXIS)
    assert packed.dtype == strict.float64
    assert packed.device == mean.device
    np.testing.assert_allclose(
        np.asarray(packed),
        2 * np.r_[exact.mean(AXIS), (exact * exact).mean(AXIS), 1, 1.5],
        rtol=1e-9,
    )
    # As `pack` and `unpack` of one rank.
    unpacked, _ = reference.unpack(packed, (3,), 2.0, 3.0)
    assert unpacked[0].dtype == unpacked[1].dtype == strict.float64
    np.testing.assert_allclose(np.asarray(unpacked[0]), exact.mean(AXIS), rtol=1e-9)
    np.testing.assert_allclose(np.asarray(unpacked[1]), exact.var(AXIS), rtol=1e-5)

    parameter = strict.asarray([0.5, 2.0, 3.0], dtype=strict.float32, device=device)
    y = generic.normalize(x, *of_batch, parameter, parameter, eps=0.0, axis=AXIS)
    assert y.device == device
    assert y.dtype == strict.float32
    sums = generic.backward_sums(y, x, *of_batch, eps=0.0, axis=AXIS)
    assert sums[0].dtype == sums[1].dtype == strict.float64
    of_channel = 128 * np.array([0.5, 2.0, 3.0])  # mean of y is its bias, y * xhat's its weight
    for found in sums:
        np.testing.assert_allclose(np.asarray(found), of_channel, rtol=1e-4)
    # Nothing is left of a gradient that is `xhat * weight + bias`.
    dx = generic.input_gradient(y, x, *of_batch, parameter, 1 / 128, *sums, eps=0.0, axis=AXIS)
    assert dx.device == device
    assert dx.dtype == strict.float32
    np.testing.assert_allclose(np.asarray(dx.to_device(mean.device)), 0, atol=1e-4)


def test_the_argument_is_left_unchanged(kernels: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4))
    before = x.copy()
    c = np.linspace(1, 2, 3)
    narrow = c.astype("float32")
    on = {"eps": 1e-5, "axis": AXIS}
    kernels.local_moments(x, axis=AXIS)
    kernels.begin_forward(x, 2.0, 3.0, axis=AXIS)
    for parameter in (c, narrow, None):
        kernels.normalize(x, c, c, parameter, parameter, **on)
        kernels.input_gradient(x, x, c, c, parameter, 0.5, c, c, **on)
    kernels.backward_sums(x, x, c, c, **on)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(c, np.linspace(1, 2, 3))
    np.testing.assert_array_equal(narrow, np.linspace(1, 2, 3).astype("float32"))


def test_a_wrong_value_of_the_variable_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setenv("MULTIBN_KERNELS", "off")
    with pytest.raises(
        ValueError, match="MULTIBN_KERNELS must be generic, or not be set: got 'off'"
    ):
        _native.__wrapped__("host")
