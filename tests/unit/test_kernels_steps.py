"""The steps between the passes: the compiled ones give the numbers of the reference."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("core")

from multibn import kernels  # noqa: E402
from multibn.kernels import generic, host, host_steps  # noqa: E402

STEPS = ("pack", "unpack", "move_averages")


def as_numpy(v: Any) -> Any:
    return v


def as_torch(v: Any) -> Any:
    require.need("torch")
    import torch

    return torch.from_numpy(np.asarray(v))


libraries = pytest.mark.parametrize("of", [as_numpy, as_torch], ids=["numpy", "torch"])


def library(v: Any) -> str:
    return type(v).__module__.partition(".")[0]


def results(
    steps: Any,
    arrays: dict[str, Any],
    dtype: Any = None,
    of: Callable[[Any], Any] = as_numpy,
) -> list[Any]:
    """Of all steps, on per-channel arrays `a` to `d`; running averages are of `dtype`."""
    a, b, c, d = arrays.values()
    c, d = (v if dtype is None else v.astype(dtype) for v in (c, d))
    given = [of(v) for v in (c, d, a, b)]
    packed = steps.pack(*given[2:], 3.0, 5.0)
    unpacked = steps.unpack(packed * 2, a.shape, 3.0, 5.0)
    return [packed, *unpacked, *steps.move_averages(*given, 0.3, 1.5)]


def data(*shape: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.5, 2.0, shape) for name in "abcd"}


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the generic steps were used")

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(generic, name, refuse)
        yield


@libraries
@pytest.mark.parametrize("shape", [(1,), (7,), (300,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_steps(
    shape: tuple[int, ...],
    dtype: str,
    of: Any,
    request: pytest.FixtureRequest,
) -> None:
    arrays = data(*shape)
    right = results(generic, arrays, dtype)
    request.getfixturevalue("compiled_only")
    found = results(host_steps, arrays, dtype, of)
    for value, expected in zip(found, right, strict=True):
        assert np.shape(value) == np.shape(expected)
        if not isinstance(value, bool):
            assert np.asarray(value).dtype == expected.dtype
        narrow = np.asarray(value).dtype == "float32"
        np.testing.assert_allclose(value, expected, rtol=1e-6 if narrow else 1e-14)


@libraries
@pytest.mark.parametrize("steps", [generic, host_steps])
def test_statistics_are_arrays_like_the_of(steps: Any, of: Any) -> None:
    for summed in (np.array([2.0, 4.0, 6.0, 12.0, 2.0, 4.0]), np.zeros(6)):
        given = of(summed)
        *found, refused, finite = steps.unpack(given, (2,), 1.0, 2.0)
        mean, var, count, element_weight = found
        for v, shape in zip(found, [(2,), (2,), (), ()], strict=True):
            assert library(v) == library(given)
            assert v.shape == shape
            assert str(v.dtype).endswith("float64")
        weights = max(summed[-2], 1)
        np.testing.assert_allclose(mean, summed[:2] / weights)
        np.testing.assert_allclose(var, summed[2:4] / weights - (summed[:2] / weights) ** 2)
        assert (float(count), float(element_weight)) == (summed[-1], 0.5 / weights)
        assert type(refused) is type(finite) is bool
        # The message may be summed in place again.
        given[...] = np.nan
        assert np.isfinite(np.asarray(mean)).all()
        assert np.isfinite(np.asarray(var)).all()


@libraries
def test_no_channels(of: Any) -> None:
    none = of(np.zeros(0))
    packed = host_steps.pack(none, none, 2.0, 4.0)
    np.testing.assert_array_equal(packed, [2.0, 4.0])
    mean, var, count, element_weight, *_ = host_steps.unpack(2 * packed, (0,), 2.0, 4.0)
    assert mean.shape == var.shape == (0,)
    assert (float(count), float(element_weight)) == (8.0, 2 / (4 * 4))


def test_moments_of_other_dtypes_and_strides_are_packed() -> None:
    require.need("torch")
    import torch

    mean, meansqr = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    for moments in (
        (as_torch(mean), as_torch(meansqr)),
        (as_torch(mean.astype("float32")), as_torch(meansqr.astype("float32"))),
        (as_torch(np.repeat(mean, 2))[::2], as_torch(meansqr)),
    ):
        packed = host_steps.pack(*moments, 2.0, 7.0)
        np.testing.assert_array_equal(packed, [2.0, 4.0, 6.0, 10.0, 2.0, 7.0])
    # Also of activations that are the reference's to do.
    x = as_torch(np.random.default_rng(0).normal(size=(2, 3, 4, 5)))
    for given, axis in ((x, (0, 2)), (torch._neg_view(x), (0, 2, 3)), (x[:0], (0, 2, 3))):
        packed = host.packed_moments(given, 2.0, 7.0, axis=axis)
        right = generic.packed_moments(given, 2.0, 7.0, axis=axis)
        torch.testing.assert_close(packed, right, rtol=0, atol=0)


@libraries
@pytest.mark.parametrize("kind", ["strided", "float32"])
def test_other_messages(kind: str, of: Any) -> None:
    numbers = np.array([2.0, 4.0, 6.0, 12.0, 2.0, 4.0])
    strided = of(np.repeat(numbers, 2))[::2]
    summed = strided if kind == "strided" else of(numbers.astype("float32"))
    mean, var, count, element_weight, *_ = host_steps.unpack(summed, (2,), 1.0, 2.0)
    for v in (mean, var, count, element_weight):
        assert library(v) == library(summed)
    np.testing.assert_array_equal(mean, [1.0, 2.0])
    np.testing.assert_array_equal(var, [2.0, 2.0])
    assert (float(count), float(element_weight)) == (4.0, 0.25)


@pytest.mark.parametrize("where", ["a", "b", "c", "d"])
@pytest.mark.parametrize("kind", ["strided", "float16", "long double", "big endian"])
def test_other_arrays_are_taken_too(where: str, kind: str) -> None:
    arrays = data(6)
    if kind == "strided":
        arrays[where] = np.repeat(arrays[where], 2)[::2]
    else:
        arrays[where] = arrays[where].astype(
            {"float16": "f2", "long double": np.longdouble, "big endian": ">f8"}[kind]
        )
    for got, right in zip(results(host_steps, arrays), results(generic, arrays), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, "float64"), np.asarray(right, "float64"), rtol=2e-3
        )


@libraries
def test_what_is_not_finite_or_refused(of: Any) -> None:
    good = np.array([4.0, 8.0, 10.0, 20.0, 2.0, 2.0])
    for steps in (host_steps, generic):
        *_, refused, finite = steps.unpack(of(good), (2,), 1.0, 1.0)
        assert (refused, finite) == (False, True)
        for bad in (np.nan, np.inf, -np.inf):
            summed = good.copy()
            summed[3] = bad
            mean, var, *_, refused, finite = steps.unpack(of(summed), (2,), 1.0, 1.0)
            assert (refused, finite) == (False, False)
            assert (float(mean[0]), float(mean[1]), float(var[0])) == (2.0, 4.0, 1.0)
            assert np.isnan(bad) == np.isnan(float(var[1]))
        *_, refused, _ = steps.unpack(of(np.full(6, np.nan)), (2,), 1.0, 1.0)
        assert refused
        zeros = of(np.zeros(6))
        mean, var, count, element_weight, *_ = steps.unpack(zeros, (2,), 0.0, 0.0)
        assert not any((*mean, *var, count, element_weight))


@libraries
def test_a_rounding_error_makes_no_negative_variance(of: Any) -> None:
    summed = np.array([0.1, 0.1 * 0.1 - 1e-17, 1.0, 1.0])
    for steps in (host_steps, generic):
        assert steps.unpack(of(summed), (1,), 1.0, 1.0).var == 0.0


@libraries
def test_a_constant_has_no_variance_over_ranks(of: Any) -> None:
    mean = np.random.default_rng(0).normal(size=1000)
    for steps in (host_steps, generic):
        packed = steps.pack(of(mean), of(mean * mean), 4.0, 4.0)
        found = steps.unpack(packed + packed, mean.shape, 4.0, 4.0)
        np.testing.assert_array_equal(found.var, 0.0)
        np.testing.assert_array_equal(found.mean, mean)


@pytest.mark.parametrize("weight", [None, [3.0, -1.0]])
def test_tensors_that_need_a_gradient_are_differentiated(weight: list[float] | None) -> None:
    """Each of the arrays that go into a pass or a step, also where the activation needs none."""
    require.need("torch")
    import torch

    def tensor(v: Any) -> Any:
        return torch.tensor(v, dtype=torch.float64)

    def check(function: Any, *arrays: Any) -> None:
        constants = [tensor(v) for v in arrays]
        for i, v in enumerate(constants):  # one of them alone
            torch.autograd.gradcheck(
                lambda leaf, i=i: function(*constants[:i], leaf, *constants[i + 1 :]),
                v.clone().requires_grad_(),
            )

    x, w = tensor([[2.0, 1.0], [0.5, 4.0]]), None if weight is None else tensor(weight)
    mean, var, a, b = [1.0, 2.0], [1.0, 4.0], [0.5, -2.0], [3.0, 1.0]
    on: Any = {"eps": 0.25, "axis": (0,)}
    check(lambda m, v: kernels.normalize(x, m, v, w, None, **on), mean, var)
    check(lambda p, q: kernels.normalize(x, tensor(mean), tensor(var), p, q, **on), a, b)
    check(lambda g, m, v: kernels.backward_sums(g, x, m, v, **on), x.tolist(), mean, var)
    check(
        lambda g, m, v, e, p, q: kernels.input_gradient(g, x, m, v, w, e, p, q, **on),
        x.tolist(), mean, var, 0.25, a, b,
    )  # fmt: skip
    check(lambda v: kernels.packed_moments(v, 2.0, 3.0, axis=(0,)), x.tolist())
    check(lambda m, q: kernels.pack(m, q, 2.0, 3.0), mean, var)
    check(lambda s: kernels.unpack(s, (1,), 2.0, 3.0)[:4], [1.0, 6.0, 2.0, 4.0])
    check(lambda m, v: kernels.move_averages(tensor(a), tensor(b), m, v, 0.5, 1.5), mean, var)
