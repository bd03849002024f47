"""All kernels: the digits that moments keep, and what a message has.

test_cuda.py runs this file where Triton interprets or a GPU is at hand.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest

from multibn import wire
from multibn.kernels import NormArgs, reference
from multibn.kernels.spec import unpack
from tests.kernels.passes import (
    AXIS,
    DEVICE,
    INTERPRETED,
    LIBRARIES,
    check,
    exact,
    last,
    layer,
    libraries,
    passes,
    statistics,
)
from tests.kernels.passes import kernels as kernels
from tests.kernels.test_passes import SHAPES, invalid


def moments(kernels: Any, x: Any, axis: tuple[int, ...] = AXIS) -> tuple[Any, Any]:
    """Mean and variance of this rank, as a message tells them."""
    i = NormArgs(x, None, None, 1.0, axis)
    if kernels is reference:
        mean, var = reference.local_moments(i, 1.0)
        return exact(mean), exact(var)
    message = exact(kernels.begin_forward(i, 1.0, 1.0))
    mean, meansqr = np.split(message[:-2], 2)
    return mean, meansqr - mean * mean


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape)


def far(*shape: int) -> Any:
    """First values far from the mean, the worst that a centre can be; one channel's is good."""
    x = normal(*shape) + 1e4
    x[0, 0].flat[:8] += 300
    return x


MANY = 40 if INTERPRETED is None else 3  # channels, of which each has programs of its own
INPUTS: dict[str, Any] = {
    "short planes": lambda: normal(64, MANY, 7, 7),
    "planes": lambda: normal(6, MANY, 28, 28) + 1e4,
    "rows": lambda: normal(5000, MANY, 1, 1) + 1e6,
    "tiny": lambda: normal(64, 2, 3, 3) * 1e-18,
    "small": lambda: normal(64, 2, 3, 3) * 1e-4,
    "huge": lambda: normal(64, 2, 3, 3) * 1e15,
    "sixteen bits": lambda: normal(16, 2, 32, 32) + 300,
    "short rows far off": lambda: far(400, 2, 5, 5),
    "planes far off": lambda: far(10, 2, 32, 32),
}
LARGE = "long columns", "large planes"
if INTERPRETED is None:  # where NumPy would add a million values one by one; and large planes
    INPUTS["long columns"] = lambda: normal(1 << 20, 4, 1, 1) + 3
    INPUTS["large planes"] = lambda: normal(8, 4, 512, 512) + 1e4


@pytest.mark.parametrize("order", [np.asarray, last], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", INPUTS)
def test_moments_keep_the_digits_of_their_input(
    kernels: Any, name: str, dtype: str, order: Any
) -> None:
    """Also squares above 65504, of 16 bits. torch's own have errors of 1e-3 to 280 for planes."""
    if dtype != "float32" and (name in LARGE or (dtype == "float16" and name != "sixteen bits")):
        return
    x = order(INPUTS[name]().astype(dtype))
    wide = x.astype("float64")
    mean, var = wide.mean(AXIS), wide.var(AXIS)
    digits = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-5}[dtype]
    got_mean, got_var = moments(kernels, LIBRARIES[-1](x))
    np.testing.assert_allclose(got_mean, mean, rtol=1e-13, atol=digits * np.sqrt(var).max())
    lost = 5e-16 * (mean * mean).max()  # by the mean of squares of a message
    np.testing.assert_allclose(got_var, var, rtol=digits, atol=lost)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_has_no_variance(kernels: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Nor over two ranks that have it; powers of two leave a product's digits as they are."""
    axis = tuple(i for i in range(len(shape)) if i != 1)
    values = np.linspace(0.1, 0.9, shape[1]).astype(dtype)
    x = np.broadcast_to(values.reshape(-1, *[1] * (len(shape) - 2)), shape)
    for of, a in product(LIBRARIES, [np.array(x), last(x)]):
        i = NormArgs(of(a), None, None, 1.0, axis)
        message = kernels.begin_forward(i, 1024.0, 1024.0)
        batch = unpack(kernels.finish_forward(i, message + message, 1024.0, 1024.0)[1])
        assert not exact(batch.var).any()
        np.testing.assert_array_equal(exact(batch.mean), values.astype("float64"))


@pytest.mark.parametrize("parameters", [("float64", "float64"), ("float64", None), (None, None)])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_what_rounding_leaves_of_the_mean_is_not_lost(
    kernels: Any, shape: tuple[int, ...], parameters: Any
) -> None:
    """A mean near 1e4 in float32 is off by up to 5e-4 of these standard deviations."""
    i, dy = layer(shape, of=LIBRARIES[-1], parameters=parameters)
    i = i._replace(x=i.x - 3 + 1e4, eps=0.0)
    mean = 1e4 + np.linspace(0.0001, 0.0009, shape[1])
    check(kernels, i, dy, statistics(i, mean=mean, var=np.full(shape[1], 4.0)), tolerance=1e-6)


@pytest.mark.parametrize("weight, count", [(0.0, 0.0), (2.5, 7.0), (3e9, 4e9), (1.0, 2.0**40 + 1)])
@libraries
def test_a_message_has_the_weight_and_the_count_that_are_given(
    kernels: Any, of: Any, weight: float, count: float
) -> None:
    i, _ = layer((3, 5, 4, 6), of=of)
    one, message = (exact(kernels.begin_forward(i, w, c)) for w, c in ((1.0, 1.0), (weight, count)))
    np.testing.assert_allclose(message[:-2], weight * one[:-2], rtol=1e-15)
    assert message[-2:].tolist() == [weight, count]


def test_results_have_memory_of_their_own(kernels: Any) -> None:
    """What a call gave is not written by the next one, which finds the same shapes."""
    one, other = (layer((4, 5, 6, 7), relu=True, residual=True) for _ in "ab")
    first = passes(kernels, *one)
    before = {name: exact(v).copy() for name, v in first.items()}
    second = passes(kernels, other[0]._replace(x=other[1]), other[0].x)

    def share(v: Any, w: Any) -> bool:
        if DEVICE == "cpu":
            return np.shares_memory(v, w)
        return bool(v.untyped_storage().data_ptr() == w.untyped_storage().data_ptr())

    for name, v in first.items():
        np.testing.assert_array_equal(exact(v), before[name])
        assert not any(share(v, w) for w in (*second.values(), *one[0][:3], one[1]))


@invalid
@libraries
def test_a_mark_stands_for_moments_that_are_not_finite(kernels: Any, of: Any) -> None:
    """The mark stands in their channels alone."""
    marks = wire.rank_bit(3), wire.NO_BIT
    for value in (np.nan, np.inf, 1e145):
        x = np.arange(24.0).reshape(4, 3, 2)
        x[1, 2, 0] = value
        i = NormArgs(of(x), None, None, 1e-5, (0, 2))
        sound = exact(kernels.begin_forward(i._replace(x=of(x[:, :2])), 4.0, 8.0))
        for mark in marks:
            sums = exact(kernels.begin_forward(i, 4.0, 8.0, mark))
            np.testing.assert_array_equal(sums[[2, 5]], mark)
            np.testing.assert_array_equal(sums[[0, 1, 3, 4, 6, 7]], sound)


@libraries
def test_a_message_is_written_where_it_is_sent(kernels: Any, of: Any) -> None:
    if INTERPRETED is not None:
        return  # to a `Message`: see triton_passes.py
    i, _ = layer((4, 5, 6, 7), of=of)
    expected = exact(kernels.begin_forward(i, 3.0, 5.0))
    memory = np.full(expected.size + 2, 7.0)
    out = memory[:-2]
    assert kernels.begin_forward(i, 3.0, 5.0, out=out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_array_equal(memory[-2:], 7.0)
    batch = unpack(kernels.finish_forward(i, out, 3.0, 5.0)[1])
    assert type(batch.mean) is type(i.x)
    out[:] = np.nan  # the transport's next message
    assert batch.var[0] > 0
