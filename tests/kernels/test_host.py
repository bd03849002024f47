"""The compiled passes of host memory: every layout and dtype."""

import itertools
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("core")

from multibn import kernels as selection  # noqa: E402
from multibn.kernels import generic as reference  # noqa: E402
from multibn.kernels import host as compiled  # noqa: E402
from tests.kernels.passes import Verbs  # noqa: E402
from tests.kernels.passes import compiled_only as compiled_only  # noqa: E402

generic, host = Verbs(reference), Verbs(compiled)

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


EPS = 0.25
WEIGHT, COUNT, ELEMENT_WEIGHT = 3.0, 5.0, 0.3


def per_channel(*shape: int) -> list[Any]:
    """A mean, a variance, a weight, a bias, and two sums."""
    rng = np.random.default_rng(1)
    mean, weight, bias, *sums = rng.normal(1, 1, (5, *shape))
    return [mean, rng.uniform(0.5, 2, shape), weight, bias, *sums]


def passes(kernels: Any, dy: Any, x: Any, c: list[Any], axis: tuple[int, ...]) -> list[Any]:
    """The results of all five."""
    mean, var, weight, bias, *sums = c
    on: Any = {"eps": EPS, "axis": axis}
    return [
        *kernels.local_moments(x, axis=axis),
        kernels.begin_forward(x, WEIGHT, COUNT, axis=axis),
        kernels.normalize(x, mean, var, weight, bias, **on),
        *kernels.backward_sums(dy, x, mean, var, **on),
        kernels.input_gradient(dy, x, mean, var, weight, ELEMENT_WEIGHT, *sums, **on),
    ]


def separate(found: list[Any]) -> list[Any]:
    """What `passes` found, the message first: it is not shaped like the others."""
    return [found[2], *found[:2], *found[3:]]


def exact(dy: Any, x: Any, c: list[Any], axis: tuple[int, ...]) -> list[Any]:
    """As `passes`, by their definition in float64."""
    dy, x = dy.astype("float64"), x.astype("float64")
    mean, var, weight, bias, *sums = (np.expand_dims(v, axis) for v in c)
    invstd = (var + EPS) ** -0.5
    xhat = (x - mean) * invstd
    moments = [(WEIGHT * v).reshape(-1) for v in (x.mean(axis), (x * x).mean(axis))]
    return [
        x.mean(axis),
        x.var(axis),
        np.concatenate([*moments, [WEIGHT, COUNT]]),
        xhat * weight + bias,
        dy.sum(axis),
        (dy * xhat).sum(axis),
        weight * invstd * (dy - ELEMENT_WEIGHT * (sums[0] + xhat * sums[1])),
    ]


def check(dy: Any, x: Any, axis: tuple[int, ...] = (0, 2, 3)) -> list[Any]:
    c = per_channel(*(n for i, n in enumerate(x.shape) if i not in axis))
    got = passes(host, dy, x, c, axis)
    for value, right in zip(got, exact(dy, x, c, axis), strict=True):
        assert value.shape == right.shape
        scale = max(np.abs(right).max(initial=0.0), 1e-30) * RTOL[x.dtype]
        np.testing.assert_allclose(value, right, rtol=RTOL[x.dtype], atol=scale)
    *_, y, _, _, dx = got
    assert y.dtype == dx.dtype == x.dtype
    assert {a.dtype for a in (*got[:3], *got[4:6])} == {np.dtype("float64")}
    return got


def data(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(3, 2, shape).astype(dtype)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_layout_and_dtype_gives_the_exact_numbers(shape: tuple[int, ...], dtype: str) -> None:
    x, dy = data(shape, dtype), data(shape, dtype, 1)
    check(dy, x)
    last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    got = check(dy, last)  # `dy` is in another order
    # Those of axes of one element mean nothing.
    y, dx, like = (np.squeeze(a).strides for a in (got[3], got[6], last))
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
def test_any_axes_can_be_reduced(shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
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
def test_views_of_any_strides_give_the_exact_numbers(view: Any, dtype: str) -> None:
    x, dy = view(data((4, 5, 6, 7), dtype)), view(data((4, 5, 6, 7), dtype, 1))
    x.flags.writeable = False
    check(dy, x)
    check(dy, x.copy())
    check(dy.copy(), x)


def test_what_the_loops_cannot_take_is_right_or_refused() -> None:
    x = data((4, 3, 2, 2))
    c = per_channel(3)
    axis = (0, 2, 3)
    right = passes(host, x, x, c, axis)
    for dy, other in (
        (x.astype(">f4"), x.astype(">f4")),
        (x, x.view(type("Special", (np.ndarray,), {}))),
        (x, np.frombuffer(b"0" + x.tobytes(), "u1")[1:].view(x.dtype).reshape(x.shape)),
        (x.astype("float64"), x),
    ):
        got = passes(host, dy, other, c, axis)
        for value, expected in zip(got, right, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
        assert got[3].dtype == other.dtype
    on: Any = {"eps": EPS, "axis": axis}
    with pytest.raises(ValueError, match="reshape"):
        host.normalize(x, *[v[:2] for v in c[:4]], **on)
    with pytest.raises(ValueError, match="broadcast"):
        host.normalize(x, *[*c[:2], c[2][:2], c[3]], **on)
    with pytest.raises(ValueError, match="reshape"):
        host.input_gradient(x, x, *[*c[:3], ELEMENT_WEIGHT, c[4], c[5][:2]], **on)
    # Statistics and sums of another dtype or stride.
    strided = [np.repeat(v, 2)[::2] for v in c]
    for value, expected in zip(passes(host, x, x, strided, axis), right, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    narrow = [v.astype("float32") for v in c]
    for value, expected in zip(passes(host, x, x, narrow, axis), right, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 2), (2, 0, 3, 2)], ids=str)
def test_an_empty_input_gives_zeros(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, "float32")
    packed, *found = separate(passes(host, x, x, [np.ones(shape[1])] * 6, (0, 2, 3)))
    for got in found:
        assert got.shape in (shape, shape[1:2])
        assert not got.any()
    np.testing.assert_array_equal(packed, [*[0.0] * 2 * shape[1], WEIGHT, COUNT])


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
    C = shape[1]
    dy, c = data(shape, seed=1), per_channel(C)
    clean = passes(host, dy, x, c, (0, 2, 3))
    x[where, 1, where, where] = bad
    found = passes(host, dy, x, c, (0, 2, 3))
    for i in (2, 3, 6):  # as rows of channels: both moments, y and dx
        found[i], clean[i] = (
            a[:-2].reshape(2, C).T if i == 2 else np.moveaxis(a, 1, 0) for a in (found[i], clean[i])
        )
    for i, (got, before) in enumerate(zip(found, clean, strict=True)):
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(before, 1, 0))
        if i == 4:  # the sum of dy
            assert got[1] == before[1]
        elif i in (3, 6):
            assert (~np.isfinite(got)).sum() == 1
        else:
            assert not np.isfinite(got[1]).any()
    assert np.isnan(found[1][1])


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_gradient_that_is_not_finite_stays_in_its_channel(shape: tuple[int, ...]) -> None:
    x, dy, c = data(shape), data(shape, seed=1), per_channel(shape[1])
    *_, clean_dy, clean_xhat, _ = passes(host, dy, x, c, (0, 2, 3))
    dy[0, 1, 0, 0] = np.nan
    *_, sum_dy, sum_dy_xhat, dx = passes(host, dy, x, c, (0, 2, 3))
    for got, before in ((sum_dy, clean_dy), (sum_dy_xhat, clean_xhat)):
        assert np.isnan(got[1])
        np.testing.assert_array_equal(np.delete(got, 1), np.delete(before, 1))
    np.testing.assert_array_equal(np.isnan(dx), np.isnan(dy))


@pytest.mark.parametrize("shape", [(64, 300, 7, 7), (6, 50, 28, 28), (5000, 40, 1, 1)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6])
def test_variance_keeps_the_digits_of_its_input(shape: tuple[int, ...], mean: float) -> None:
    x = (mean + np.random.default_rng(0).normal(size=shape)).astype("float32")
    exact, lost = x.astype("float64"), 5e-16 * mean * mean  # by the mean of squares of a message
    for given, digits, mean_digits in ((x, 1e-6, 1e-7), (exact, 1e-12, 1e-14)):
        got = host.local_moments(given, axis=(0, 2, 3))
        np.testing.assert_allclose(got[0], exact.mean((0, 2, 3)), rtol=1e-14, atol=mean_digits)
        np.testing.assert_allclose(got[1], exact.var((0, 2, 3)), rtol=digits, atol=lost)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_has_no_variance_in_any_layout(shape: tuple[int, ...], dtype: str) -> None:
    x = np.full(shape, 0.1, dtype)
    for like in (x, np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)):
        mean, var = host.local_moments(like, axis=(0, 2, 3))
        assert (var == 0).all()
        assert (mean == x.flat[0]).all()
        # Nor over two ranks that have it; powers of two leave a product's digits as they are.
        packed = host.begin_forward(like, 1024.0, 1024.0, axis=(0, 2, 3))
        of_both = host.unpack(packed + packed, mean.shape, 1024.0, 1024.0)
        assert (of_both.var == 0).all()
        assert (of_both.mean == x.flat[0]).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("kernels", [generic, host], ids=["generic", "host"])
def test_what_rounding_leaves_of_the_mean_is_not_lost(kernels: Any, shape: tuple[int, ...]) -> None:
    """In float32 a mean near 1e4 is off by up to 5e-4 of these standard deviations."""
    C = shape[1]
    mean = 1e4 + np.linspace(0.0001, 0.0009, C)
    x = (1e4 + np.random.default_rng(0).normal(size=shape)).astype("float32")
    four, ones, zeros = np.full(C, 4.0), np.ones(C), np.zeros(C)
    right = x.astype("float64") - mean[:, None, None]
    on: Any = {"eps": 0.0, "axis": (0, 2, 3)}
    for weight, bias in ((2 * ones, zeros), (2 * ones, None), (None, None)):
        y = kernels.normalize(x, mean, four, weight, bias, **on)
        of_weight = 0.5 if weight is None else 1.0
        np.testing.assert_allclose(y, of_weight * right, rtol=0, atol=2e-6)
        # With an element weight of -1 and a sum of 1 it is `weight * invstd * xhat`.
        nothing = np.zeros_like(x)
        dx = kernels.input_gradient(nothing, x, mean, four, weight, -1.0, zeros, ones, **on)
        np.testing.assert_allclose(dx, of_weight * right / 2, rtol=0, atol=2e-6)
    sums = kernels.backward_sums(np.ones_like(x), x, mean, four, **on)
    np.testing.assert_allclose(sums[1], right.sum((0, 2, 3)) / 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(400, 2, 5, 5), (10, 2, 32, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_values_far_from_the_mean_cost_no_digits(shape: tuple[int, ...], dtype: str) -> None:
    """The worst that the moments' centre can be; one channel's is good."""
    x = (1e4 + np.random.default_rng(0).normal(size=shape)).astype(dtype)
    x[0, 0].flat[:8] += 300
    for like in (x, np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)):
        exact = x.astype("float64").var((0, 2, 3))
        rtol = 1e-6 if dtype == "float32" else 1e-12
        got = host.local_moments(like, axis=(0, 2, 3))[1]
        np.testing.assert_allclose(got, exact, rtol=rtol, atol=1e-7)  # what a message loses


def test_tensors_give_the_numbers_of_arrays() -> None:
    require.need("torch")
    import torch

    x, dy = (torch.from_numpy(data((4, 5, 6, 7), seed=i)) for i in (0, 1))
    numbers = per_channel(5)
    c = [torch.from_numpy(v) for v in numbers]
    axis = (0, 2, 3)
    right = passes(host, dy.numpy(), x.numpy(), numbers, axis)
    same = [
        lambda a: a,
        lambda a: a.to(memory_format=torch.channels_last),
        lambda a: a.repeat(1, 2, 1, 1)[:, :5],
        lambda a: torch.nn.Parameter(a).detach(),
        lambda a: torch._neg_view(-a),
    ]
    for one, other in itertools.product(same, same):
        got = separate(passes(host, one(dy), other(x), c, axis))
        assert all(type(a) is torch.Tensor for a in got)
        for value, expected in zip(got, separate(right), strict=True):
            np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-5, atol=1e-5)
    expanded = torch.ones(()).expand(x.shape)  # what `y.sum().backward()` hands on
    for value, expected in zip(
        passes(host, expanded, x, c, axis),
        passes(host, np.ones(x.shape, "float32"), x.numpy(), numbers, axis),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(value), expected)
    for dtype in (torch.float16, torch.bfloat16):
        packed, *got = separate(passes(host, dy.to(dtype), x.to(dtype), c, axis))
        other, *reference = separate(passes(generic, dy.to(dtype), x.to(dtype), c, axis))
        np.testing.assert_allclose(packed, other, rtol=1e-6)
        for value, expected in zip(got, reference, strict=True):
            assert value.dtype == expected.dtype
            torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-2)


def test_tensors_without_memory_of_their_own_have_gradients() -> None:
    require.need("torch")
    import torch

    x = torch.from_numpy(data((4, 5, 6, 7)))
    c = torch.ones(5, dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        k = Verbs(selection.select(x))
        summed = k.begin_forward(x, 2.0, 2.0, axis=(0, 2, 3))
        options: Any = {"eps": 0.0, "axis": (0, 2, 3)}
        y, *_ = k.finish_forward(summed, x, c, None, 2.0, 2.0, **options)
        return y.square().sum() + y[0].sum()

    def packed(x: torch.Tensor) -> Any:
        k = Verbs(selection.select(x))
        return k.begin_forward(x, 2.0, 3.0, axis=(0, 2, 3)).square().sum()

    for function in (loss, packed):
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        assert leaf.grad is not None
        assert leaf.grad.any()
        torch.testing.assert_close(torch.func.grad(function)(x), leaf.grad)
