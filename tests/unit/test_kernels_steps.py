"""The steps between the passes: the compiled ones give the numbers of the reference."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("numba")

from multibn import kernels  # noqa: E402
from multibn.kernels import generic, host_steps  # noqa: E402

STEPS = ("pack", "unpack", "affine", "over_std", "gradient_coefficients", "move_averages")
EPS = 1e-5


def results(steps: Any, arrays: dict[str, Any], dtype: Any = None) -> list[Any]:
    """Of all steps, on per-channel arrays `a` to `e`; parameters are of `dtype`."""
    a, b, c, d, e = arrays.values()
    w, v = (p if dtype is None else p.astype(dtype) for p in (d, e))
    packed = steps.pack(a, b, 3.0, 5.0)
    found = [packed, *steps.unpack(packed * 2, a.shape, 3.0, 5.0)]
    for weight, bias in ((w, v), (None, v), (w, None), (None, None)):
        found += steps.affine(b, weight, bias, eps=EPS)
    found.append(steps.over_std(a, b, eps=EPS))
    for weight in (w, None):
        found += steps.gradient_coefficients(b, weight, a[..., 0].sum(), c, d, eps=EPS)
    return [*found, *steps.move_averages(w, v, a, b, 0.3, 1.5)]


def data(*shape: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.5, 2.0, shape) for name in "abcde"}


def check(got: list[Any], right: list[Any]) -> None:
    for value, expected in zip(got, right, strict=True):
        assert np.shape(value) == np.shape(expected)
        assert getattr(value, "dtype", None) == getattr(expected, "dtype", None)
        np.testing.assert_allclose(value, expected, rtol=1e-6 if _is_narrow(value) else 1e-14)


def _is_narrow(value: Any) -> bool:
    return "float32" in str(getattr(value, "dtype", ""))


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the generic steps were used")

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(generic, name, refuse)
        yield


@pytest.mark.parametrize("shape", [(1,), (7,), (300,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_compiled_steps(
    shape: tuple[int, ...], dtype: str, library: str, request: pytest.FixtureRequest
) -> None:
    arrays = data(*shape)
    right = results(generic, arrays, dtype)
    request.getfixturevalue("compiled_only")
    if library == "numpy":
        check(results(host_steps, arrays, dtype), right)
        return
    require.need("torch")
    import torch

    class Steps:
        """The same of tensors."""

        def __getattr__(self, name: str) -> Any:
            def step(*arguments: Any, **options: Any) -> Any:
                arguments = tuple(
                    torch.from_numpy(np.asarray(v)) if isinstance(v, np.ndarray) else v
                    for v in arguments
                )
                found = getattr(host_steps, name)(*arguments, **options)
                if isinstance(found, torch.Tensor):
                    return found.numpy()
                return tuple(v.numpy() if isinstance(v, torch.Tensor) else v for v in found)

            return step

    check(results(Steps(), arrays, dtype), right)


@pytest.mark.parametrize("where", ["a", "b", "c", "d", "e"])
@pytest.mark.parametrize("kind", ["strided", "float16", "long double", "big endian"])
def test_other_arrays_are_taken_too(where: str, kind: str) -> None:
    arrays = data(6)
    if kind == "strided":
        arrays[where] = np.repeat(arrays[where], 2)[::2]
    elif where in "de":  # parameters may be of any dtype
        arrays[where] = arrays[where].astype(
            {"float16": "f2", "long double": np.longdouble, "big endian": ">f8"}[kind]
        )
    for got, right in zip(results(host_steps, arrays), results(generic, arrays), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, "float64"), np.asarray(right, "float64"), rtol=2e-3
        )


def test_what_is_not_finite_or_refused() -> None:
    good = np.array([4.0, 8.0, 10.0, 20.0, 2.0, 2.0])
    for steps in (host_steps, generic):
        *_, refused, finite = steps.unpack(good, (2,), 1.0, 1.0)
        assert (refused, finite) == (False, True)
        for bad in (np.nan, np.inf, -np.inf):
            summed = good.copy()
            summed[3] = bad
            *_, refused, finite = steps.unpack(summed, (2,), 1.0, 1.0)
            assert (refused, finite) == (False, False)
        *_, refused, _ = steps.unpack(np.full(6, np.nan), (2,), 1.0, 1.0)
        assert refused
        mean, var, count, element_weight, *_ = steps.unpack(np.zeros(6), (2,), 0.0, 0.0)
        assert not any((*mean, *var, count, element_weight))


def test_a_rounding_error_makes_no_negative_variance() -> None:
    summed = np.array([0.1, 0.1 * 0.1 - 1e-17, 1.0, 1.0])
    for steps in (host_steps, generic):
        assert steps.unpack(summed, (1,), 1.0, 1.0).var == 0.0


def test_a_constant_has_no_variance_over_ranks() -> None:
    mean = np.random.default_rng(0).normal(size=1000)
    for steps in (host_steps, generic):
        packed = steps.pack(mean, mean * mean, 4.0, 4.0)
        assert not steps.unpack(packed + packed, mean.shape, 4.0, 4.0).var.any()


def test_tensors_that_need_a_gradient_are_differentiated() -> None:
    require.need("torch")
    import torch

    var = torch.tensor([1.0, 4.0], dtype=torch.float64, requires_grad=True)
    kernels.over_std(torch.ones(2, dtype=torch.float64), var, eps=0.0).sum().backward()
    assert var.grad is not None
    torch.testing.assert_close(var.grad, torch.tensor([-0.5, -0.0625], dtype=torch.float64))
