"""What the passes take beside activations: weights and biases, statistics, sums and numbers."""

from typing import Any

import numpy as np
import pytest

from tests.helpers import require
from tests.helpers.spread import spread

require.need("core")

from multibn import kernels as selection  # noqa: E402
from tests.kernels.passes import Verbs, as_numpy, as_torch, libraries  # noqa: E402
from tests.kernels.passes import compiled_only as compiled_only  # noqa: E402
from tests.kernels.test_host import EPS, data, generic, host, passes, per_channel  # noqa: E402

AXIS = (0, 2, 3)
SHAPE = (4, 5, 6, 7)
ON: Any = {"eps": EPS, "axis": AXIS}


def definition(dy: Any, x: Any, c: list[Any], element_weight: float, eps: float) -> tuple[Any, Any]:
    """y and dx in float64."""
    dy, x = dy.astype("float64"), x.astype("float64")
    c = [*c[:2], 1.0 if c[2] is None else c[2], 0.0 if c[3] is None else c[3], *c[4:]]
    wide = [np.broadcast_to(np.asarray(v, "float64"), c[0].shape) for v in c]
    mean, var, weight, bias, *sums = (np.expand_dims(v, AXIS) for v in wide)
    std = np.sqrt(var + eps)
    xhat = (x - mean) / std
    dx = weight / std * (dy - element_weight * (sums[0] + xhat * sums[1]))
    return xhat * weight + bias, dx


def y_and_dx(
    kernels: Any, dy: Any, x: Any, c: list[Any], element_weight: Any, on: Any = ON
) -> tuple[Any, Any]:
    """Of a mean, a variance, a weight, a bias and two sums."""
    mean, var, weight, bias, *sums = c
    return (
        kernels.normalize(x, mean, var, weight, bias, **on),
        kernels.input_gradient(dy, x, mean, var, weight, element_weight, *sums, **on),
    )


def cast(v: Any, dtype: str | None) -> Any:
    if dtype is None:
        return None
    return np.repeat(v, 2)[::2] if dtype == "strided" else v.astype(dtype)


PARAMETERS = [
    ("float32", "float32"),
    ("float64", "float64"),
    ("float16", "float16"),
    ("float32", "float64"),
    ("float64", "float16"),
    ("strided", "strided"),
    ("float32", "strided"),
    ("float32", None),
    (None, "float32"),
    ("float16", None),
    (None, "strided"),
    (None, None),
]


@pytest.mark.parametrize("kernels", [generic, host], ids=["generic", "host"])
@pytest.mark.parametrize(
    "parameters, dtype, of",
    spread(
        PARAMETERS,
        over=[["float32", "float64", "float16"], [as_numpy, as_numpy, as_torch, as_torch]],
    ),
)
def test_weight_and_bias_may_be_missing_or_of_any_dtype(
    kernels: Any,
    parameters: tuple[str | None, str | None],
    dtype: str,
    of: Any,
    request: pytest.FixtureRequest,
) -> None:
    if kernels is host:
        request.getfixturevalue("compiled_only")
    x, dy, c = data(SHAPE, dtype), data(SHAPE, dtype, 1), per_channel(5)
    c[2:4] = cast(c[2], parameters[0]), cast(c[3], parameters[1])
    right = definition(dy, x, c, 0.3, EPS)
    rtol = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-3}[dtype]
    found = y_and_dx(kernels, of(dy), of(x), list(map(of, c)), 0.3)
    for got, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol * abs(expected).max())


def test_parameters_of_torch_may_need_gradients() -> None:
    """Those of a layer need gradients, and may be of a dtype that NumPy does not know."""
    require.need("torch")
    import torch

    x, dy = (torch.from_numpy(data(SHAPE, seed=i)) for i in (0, 1))
    mean, var, weight, bias, *sums = (torch.from_numpy(v) for v in per_channel(5))
    for dtype in (torch.float32, torch.bfloat16):
        w, b = (torch.nn.Parameter(v.to(dtype)) for v in (weight, bias))
        right = definition(
            dy.numpy(), x.numpy(), [mean, var, w.detach().double(), b.detach().double(), *sums],
            0.3, EPS,
        )  # fmt: skip
        for kernels in (generic, host):
            with torch.no_grad():
                found = y_and_dx(kernels, dy, x, [mean, var, w, b, *sums], 0.3)
            for got, expected in zip(found, right, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [generic, host], ids=["generic", "host"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 10.0])
def test_eps_is_added_to_the_variance(kernels: Any, eps: float) -> None:
    x, dy, c = data(SHAPE, "float64"), data(SHAPE, "float64", 1), per_channel(5)
    c[1] = np.array([1e-12, 1e-6, 1.0, 1e6, 1e12])
    on: Any = {"eps": eps, "axis": AXIS}
    found = y_and_dx(kernels, dy, x, c, 0.3, on)
    right = definition(dy, x, c, 0.3, eps)
    for got, expected in zip(found, right, strict=True):
        size = abs(expected).max(AXIS, keepdims=True)
        assert (abs(got - expected) <= 1e-13 * size).all()
    sums = kernels.backward_sums(dy, x, *c[:2], **on)
    xhat = (x - c[0][:, None, None]) / np.sqrt(c[1] + eps)[:, None, None]
    np.testing.assert_allclose(sums[0], dy.sum(AXIS), rtol=1e-12)
    np.testing.assert_allclose(sums[1], (dy * xhat).sum(AXIS), rtol=1e-12)
    # A channel without variance is finite where something is added, and no other's concern.
    c[1][2] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        found = y_and_dx(kernels, dy, x, c, 0.3, on)
        sums = kernels.backward_sums(dy, x, *c[:2], **on)
    for got in (*found, sums[1]):
        channels = np.moveaxis(got, 1, 0) if got.ndim == 4 else got[:, None]
        assert np.isfinite(np.delete(channels, 2, 0)).all()
        assert np.isfinite(channels[2]).all() == (eps > 0)


@pytest.mark.parametrize("kernels", [generic, host], ids=["generic", "host"])
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf - inf
def test_what_is_not_finite_stays_in_its_channel(
    kernels: Any, which: int, bad: float, dtype: str
) -> None:
    """Of a mean, a variance, a weight, a bias and two sums."""
    x, dy, c = data(SHAPE), data(SHAPE, seed=1), per_channel(5)
    c[2:4] = [v.astype(dtype) for v in c[2:4]]
    clean = passes(kernels, dy, x, c, AXIS)
    c[which][3] = bad
    found = passes(kernels, dy, x, c, AXIS)
    of_x, reached = {0, 1, 2, 4}, {3: {0, 1, 2, 3}, 5: {0, 1}, 6: {0, 1, 2, 4, 5}}
    for i, (got, before) in enumerate(zip(found, clean, strict=True)):
        if i in of_x:  # moments, and the sum of dy
            np.testing.assert_array_equal(got, before)
            continue
        got, before = (np.moveaxis(v, 1, 0) if v.ndim > 1 else v for v in (got, before))
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(before, 3, 0))
        if which not in reached[i]:
            np.testing.assert_array_equal(got[3], before[3])
        elif np.isnan(bad):
            assert np.isnan(got[3]).all()
        else:
            assert not np.array_equal(got[3], before[3])


@libraries
def test_any_number_is_an_element_weight(of: Any) -> None:
    x, dy, c = data(SHAPE), data(SHAPE, seed=1), per_channel(5)
    array = of(np.array([0.0, 0.3]))
    given: list[Any] = [of(dy), of(x), list(map(of, c))]
    for kernels in (generic, host):
        numbers: list[Any] = [0.3, np.float64(0.3), of(np.array(0.3)), array[1:].reshape(())]
        first, *others = (y_and_dx(kernels, *[*given, number])[1] for number in numbers)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("kernels", [generic, host], ids=["generic", "host"])
def test_results_have_memory_of_their_own(kernels: Any) -> None:
    """What a call gave is not written by the next one, which finds the same shapes."""
    c = per_channel(5)
    found = passes(kernels, data(SHAPE), data(SHAPE, seed=1), c, AXIS)
    before = [np.array(v) for v in found]
    others = passes(kernels, data(SHAPE, seed=2), data(SHAPE, seed=3), c[::-1], AXIS)
    for i, (value, then) in enumerate(zip(found, before, strict=True)):
        np.testing.assert_array_equal(value, then)
        assert not any(np.shares_memory(value, v) for v in (*others, *found[i + 1 :], *c))


@pytest.mark.parametrize("kernels", [generic, host], ids=["generic", "host"])
def test_packed_moments_are_written_where_they_are_sent(kernels: Any) -> None:
    x = data(SHAPE)
    expected = kernels.begin_forward(x, 3.0, 5.0, axis=AXIS)
    memory = np.full(expected.size + 2, 7.0)
    out = memory[:-2]
    for like in (x, as_torch(x)):
        out[:] = 0.0
        assert kernels.begin_forward(like, 3.0, 5.0, axis=AXIS, out=out) is out
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        np.testing.assert_array_equal(memory[-2:], 7.0)
        on: Any = {"eps": 0.0, "axis": AXIS}
        _, mean, var, *_ = kernels.finish_forward(out, like, None, None, 3.0, 5.0, **on)
        assert type(mean) is type(like)
        out[:] = 0.0  # the transport's next message
        assert var[0] > 0


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@libraries
def test_normalize_adds_the_residual_before_the_relu(relu: bool, residual: bool, of: Any) -> None:
    x, other, c = data(SHAPE), data(SHAPE, seed=1) - 3, per_channel(5)
    right, _ = definition(x, x, c, 0.0, EPS)
    right = right + other if residual else right
    right = np.maximum(right, 0) if relu else right
    assert (right < 0).any() != relu
    before = other.copy()
    given: list[Any] = [of(v) for v in (x, *c[:4])]
    other = of(other)
    y = Verbs(selection.select(given[0])).normalize(
        *given, **ON, residual=other if residual else None, relu=relu
    )
    assert type(y) is type(given[0])
    assert y.dtype == given[0].dtype
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(other, before)
