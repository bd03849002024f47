"""The engine over ranks as threads, in several array libraries, against the oracle."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest

from multibn._typing import Weighting
from multibn.communicators import SingleProcess
from multibn.communicators.layer_communicator import reject_input
from multibn.engine import PopulationEstimator, running_variance, statistics
from multibn.engine.masks import WEIGHTINGS, rank_weight
from multibn.engine.plan import Plan
from multibn.engine.statistics import BatchStatistics, aggregate, local_moments
from multibn.kernels import Gradient, NormArgs
from multibn.kernels.spec import unpack
from multibn.parity import oracle
from multibn.parity.oracle import relative_error
from tests.helpers.launch import ROOT
from tests.helpers.ranks import CountingCommunicator, ThreadCommunicator, run_ranks

EPS = 1e-5
C = 3

# Shapes of the ranks' batches.
SPLITS: dict[str, Callable[[int], Sequence[tuple[int, ...]]]] = {
    "even": lambda size: [(2, C, 4)] * size,
    "uneven": lambda size: [(2 + rank, C, 2 + rank) for rank in range(size)],
    "single elements": lambda size: [(5, C, 1)] + [(1, C, 1)] * (size - 1),
    "some empty": lambda size: [(3 * (rank % 2 == 0), C, 4) for rank in range(size)],
    "no spatial extent": lambda size: [(2, C, 5 * (rank == 0)) for rank in range(size)],
}


@pytest.fixture(params=["array_api_strict", "numpy", "torch"])
def xp(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def as_numpy(a: Any) -> Any:
    return np.asarray(a, dtype=np.float64)


@pytest.mark.parametrize("dtype, bound", [("float32", 2e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_forward_and_backward_equal_the_oracle(
    xp: Any, size: int, split: str, weighting: Any, dtype: str, bound: float
) -> None:
    rng = np.random.default_rng(size)
    shapes = SPLITS[split](size)
    xs = [rng.normal(1, 2, s).astype(dtype) for s in shapes]
    dys = [rng.normal(size=s).astype(dtype) for s in shapes]
    weight, bias = (rng.normal(size=C).astype(dtype) for _ in range(2))
    expected = oracle.batch_norm(xs, dys, weight, bias, eps=EPS, weighting=weighting)

    def both_ways(communicator: ThreadCommunicator) -> Any:
        dx: Any
        counting = CountingCommunicator(communicator)
        x, dy, w, b = (
            xp.asarray(a) for a in (xs[communicator.rank], dys[communicator.rank], weight, bias)
        )
        i = NormArgs(x, w, b, EPS, (0, 2))
        plan = Plan(i, counting, weighting=weighting)
        y, packed = plan.forward(i)
        batch = unpack(packed)
        again = aggregate(local_moments(x), counting, weighting=weighting)
        for one, other in zip(batch, again, strict=True):
            np.testing.assert_allclose(as_numpy(one), as_numpy(other), rtol=1e-12)
        gradient = Gradient(dy, i, packed)
        dx, _, *parameters = plan.backward(gradient, means=True)
        assert counting.take() == [2 * C + 2, 2 * C + 2, 2 * C]
        assert x.dtype == y.dtype == dx.dtype
        return [as_numpy(a) for a in (y, dx, *parameters, *batch[:3])]

    for rank, (y, dx, dweight, dbias, mean, var, count) in enumerate(run_ranks(size, both_ways)):
        dweight, dbias = size * dweight, size * dbias
        assert relative_error(y, expected.y[rank]) < bound
        assert relative_error(dx, expected.dx[rank]) < bound
        assert relative_error(dweight, expected.dweight) < bound
        assert relative_error(dbias, expected.dbias) < bound
        assert relative_error(mean, expected.mean) < bound
        assert relative_error(var, expected.var) < bound
        assert count == expected.count


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_oracle_equals_finite_differences(weighting: str, masked: bool) -> None:
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(2, 2, 2)), rng.normal(size=(3, 2, 1))]
    dys = [rng.normal(size=x.shape) for x in xs]
    masks = [np.array([[1, 0], [1, 1]], bool), np.array([[1], [0], [1]], bool)]
    weight, bias = rng.normal(size=2), rng.normal(size=2)
    options: Any = {"eps": EPS, "weighting": weighting, "masks": masks if masked else None}
    h = 1e-6

    def loss(xs: list[Any], weight: Any, bias: Any) -> float:
        result = oracle.batch_norm(xs, dys, weight, bias, **options)
        return float(sum((y * dy).sum() for y, dy in zip(result.y, dys, strict=True)))

    result = oracle.batch_norm(xs, dys, weight, bias, **options)
    for analytic, variable in [*zip(result.dx, xs, strict=True), (result.dweight, weight),
                               (result.dbias, bias)]:  # fmt: skip
        for index in np.ndindex(variable.shape):
            old = variable[index]
            variable[index] = old + h
            above = loss(xs, weight, bias)
            variable[index] = old - h
            below = loss(xs, weight, bias)
            variable[index] = old
            assert abs((above - below) / (2 * h) - analytic[index]) < 1e-7


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_mask_of_all_elements_weights_ranks_as_no_mask_does(xp: Any, weighting: Any) -> None:
    rng = np.random.default_rng(0)
    xs = [rng.normal(n, 1, (n, C, m)) for n, m in ((4, 2), (16, 1), (0, 3), (1, 1))]
    expected = oracle.batch_norm(xs, xs, np.ones(C), np.zeros(C), eps=EPS, weighting=weighting)

    def batch(communicator: ThreadCommunicator) -> Any:
        x = xp.asarray(xs[communicator.rank])
        everything = xp.ones((x.shape[0], 1, x.shape[2])) > 0  # NumPy 1.24 has no name for booleans
        inputs = [NormArgs(x, None, None, EPS, (0, 2), mask=m) for m in (None, everything)]
        results = [Plan(i, communicator, weighting=weighting).forward(i) for i in inputs]
        return [[as_numpy(a) for a in (y, *unpack(packed))] for y, packed in results]

    for rank, (unmasked, masked) in enumerate(run_ranks(len(xs), batch)):
        np.testing.assert_array_equal(masked[-1], unmasked[-1])  # the weight of an element
        for found in (unmasked, masked):
            for one, right in zip(
                found, (expected.y[rank], expected.mean, expected.var), strict=False
            ):
                np.testing.assert_allclose(one, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_weight_is_the_oracles_for_numbers_and_arrays(xp: Any, weighting: Any) -> None:
    """The mean of ones tells what they count for, beside a zero on a rank of weight 1."""
    for samples, length in ((4, 5), (2, 3), (1, 1), (0, 5)):
        xs = [np.ones((samples, 1, length)), np.zeros((1, 1, 1))]
        options: Any = {"eps": EPS, "weighting": weighting}
        (mean,) = oracle.batch_norm(xs, xs, np.ones(1), np.zeros(1), **options).mean
        for of in (float, partial(xp.asarray, dtype=xp.float64)):
            weight, kind = rank_weight(of(samples * length), of(samples), weighting), type(of(1))
            assert abs(float(weight) - mean / (1 - mean)) < 1e-12, f"{weighting!r} of {kind}"


def test_each_weighting_is_a_word_of_the_signatures_and_of_the_documents() -> None:
    assert get_args(Weighting) == tuple(WEIGHTINGS), "`_typing.Weighting` must list WEIGHTINGS"
    conventions = (ROOT / "docs/conventions.md").read_text()
    missing = [word for word in WEIGHTINGS if f'`"{word}"`' not in conventions]
    assert not missing, f"docs/conventions.md must say what these weightings are: {missing}"


def test_statistics_are_zero_where_all_ranks_are_empty(xp: Any) -> None:
    def both_ways(communicator: ThreadCommunicator) -> Any:
        dx: Any
        x, ones = xp.zeros((0, C, 4)), xp.ones(C)
        i = NormArgs(x, ones, ones, EPS, (0, 2))
        plan = Plan(i, communicator, weighting="element")
        y, packed = plan.forward(i)
        batch = unpack(packed)
        dx, _, *gradients = plan.backward(Gradient(x, i, packed))
        assert y.shape == dx.shape == x.shape
        return [as_numpy(a) for a in (*batch, *gradients)]

    for arrays in run_ranks(3, both_ways):
        assert all((a == 0).all() for a in arrays)


@pytest.mark.parametrize("axis", [(0, 1, 2), (0,), (0, 2)])
def test_any_axes_can_be_channels(xp: Any, axis: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 2, 5))
    mean = local_moments(xp.asarray(x), axis=axis).mean
    np.testing.assert_allclose(as_numpy(mean), x.mean(axis), rtol=1e-12)


def test_a_refusal_reaches_the_other_ranks() -> None:
    """Also a rank whose own moments are not finite, which is not said to refuse."""

    def step(communicator: ThreadCommunicator) -> None:
        x = np.full((2, C), np.nan)
        if communicator.rank in (0, 2):
            reject_input(communicator)
        else:
            with pytest.raises(RuntimeError, match=r"rank 1 stops in.*rank\(s\) \[0, 2\] of 3"):
                aggregate(local_moments(x), communicator)

    run_ranks(3, step)
    reject_input(SingleProcess())  # nobody to tell


def test_a_population_has_the_statistics_of_its_batches_as_one(xp: Any) -> None:
    def step(communicator: ThreadCommunicator) -> None:
        rng = np.random.default_rng(communicator.rank)
        batches = [rng.normal(1, 2, (n, C)) for n in (communicator.rank, 3)]
        estimator = PopulationEstimator(xp.zeros(C))
        for batch in batches:
            estimator.update(local_moments(xp.asarray(batch)))
        whole = aggregate(local_moments(np.concatenate(batches)), communicator)
        for found, expected in zip(estimator.compute(communicator), whole, strict=True):
            np.testing.assert_allclose(as_numpy(found), expected, rtol=1e-12)

    run_ranks(3, step)


def test_the_rank_whose_moments_are_not_finite_is_named(xp: Any) -> None:
    """Also by a population, to which a batch was added before."""

    def step(communicator: ThreadCommunicator) -> None:
        x = np.ones((2, C))
        x[0, 0] = np.nan if communicator.rank == 1 else 1.0
        estimator = PopulationEstimator(xp.zeros(C))
        for v in (np.ones((2, C)), x):
            moments = local_moments(xp.asarray(v))
            estimator.update(moments)
        for compute in (estimator.compute, partial(aggregate, moments)):
            with pytest.raises(FloatingPointError, match=r"that overflow on rank\(s\) \[1\] of 3"):
                compute(communicator)

    run_ranks(3, step)


@pytest.mark.parametrize("kind", [np.ma.array, np.matrix])
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_of_another_arithmetic_are_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"plain array: got (Masked|matrix).*\. Pass numpy"):
        local_moments(kind(np.ones((2, 3))))


def test_integers_are_refused(xp: Any) -> None:
    with pytest.raises(TypeError, match=r"real floating-point dtype: got .*int32"):
        local_moments(xp.ones((2, 3), dtype=xp.int32))


@pytest.mark.parametrize("axis", [(), (2,), (-2,), (0, 0), (0.0,), [0], 0])
def test_axes_that_the_input_lacks_are_refused(axis: Any) -> None:
    with pytest.raises(ValueError, match=r"`axis` must be a tuple of .* got .* shape \(2, 3\)"):
        local_moments(np.ones((2, 3)), axis=axis)


@pytest.mark.parametrize("dtype, shape", [("bool", (2, 3)), ("bool", (1, 1)), ("int64", (2, 1))])
def test_a_mask_of_another_shape_or_dtype_is_refused(xp: Any, dtype: str, shape: Any) -> None:
    mask = xp.ones(shape) > 0 if dtype == "bool" else xp.ones(shape, dtype=xp.int64)
    message = rf"`mask` must have shape \(2, 1\) and dtype bool: got .*\), .*{dtype}"
    with pytest.raises(ValueError, match=message):
        local_moments(xp.ones((2, 3)), mask=mask)


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="`weighting` must be one of 'element', 'sample', 'rank'"):
        aggregate(local_moments(np.ones((2, 3))), SingleProcess(), weighting="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_float64", [True, False])
def test_a_library_without_float64_is_refused(has_float64: bool) -> None:
    """JAX with its defaults gives float32 and a warning; others lack the name."""

    def zeros(shape: int, dtype: Any) -> Any:
        warnings.warn("float64 is not available", UserWarning, stacklevel=1)
        return np.zeros(shape, np.float32)

    xp = ModuleType("other")
    vars(xp).update({"float64": np.dtype("float64")} if has_float64 else {}, zeros=zeros)
    message = rf"Array gives {'float32' if has_float64 else 'None'}\. With JAX, set jax_enable_x64"
    kind = type("Array", (), {"__array_namespace__": lambda self, api_version=None: xp})
    with pytest.raises(TypeError, match=message):
        statistics.local_moments(kind())


@pytest.mark.parametrize("dtype, large", [("float64", 1e154), ("float32", 2e19)])
def test_the_rank_of_squares_that_overflow_is_named(dtype: str, large: float) -> None:
    def refused(communicator: ThreadCommunicator) -> None:
        x = np.ones((2, C), dtype) * np.array(large if communicator.rank == 1 else 1.0, dtype)
        x[0] *= -1
        i = NormArgs(x, None, None, EPS, (0,))
        with pytest.raises(FloatingPointError, match=r"that overflow on rank\(s\) \[1\] of 2"):
            Plan(i, communicator, weighting="element").forward(i)

    run_ranks(2, refused)


BATCH = BatchStatistics(np.array([2.0]), np.array([3.0]), np.array(10.0), np.array(0.1))


@pytest.mark.parametrize(
    "convention, local_count, factor",
    [
        ("unbiased_global", 4, 10 / 9),
        ("unbiased_local", 4, 4 / 3),
        ("unbiased_local", 1, 1),  # ChainerMN's m/max(m-1, 1)
        ("unbiased_local", 0, 10 / 9),  # of a rank without data, which has no factor of its own
        ("unbiased_local", np.array(0.0), 10 / 9),
        ("unbiased_local", np.array(1.0), 1),
        ("unbiased_local", np.array(2.0), 2),
        ("biased", 4, 1),
    ],
)
def test_each_convention_has_its_factor_of_the_variance(
    convention: str, local_count: float, factor: float
) -> None:
    got = running_variance(BATCH, local_count=local_count, convention=convention)  # type: ignore[arg-type]
    np.testing.assert_allclose(got, [3.0 * factor])
