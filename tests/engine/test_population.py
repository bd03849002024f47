"""Running statistics and the population estimator."""

from typing import Any

import numpy as np
import pytest

from multibn.communicators import SingleProcess
from multibn.engine import PopulationEstimator, local_moments, running_variance
from multibn.engine.statistics import BatchStatistics, aggregate
from multibn.kernels import Running, generic
from multibn.parity import oracle
from tests.helpers.ranks import ThreadCommunicator, run_ranks


def batch_of(count: float, mean: float = 2.0, var: float = 3.0) -> BatchStatistics:
    return BatchStatistics(
        np.array([mean]), np.array([var]), np.array(count), np.array(1 / max(count, 1))
    )


def moved(
    mean: Any, var: Any, batch: BatchStatistics, momentum: float, local_count: float,
    convention: Any = "unbiased_global",
) -> tuple[Any, Any]:  # fmt: skip
    running = Running(mean.copy(), var.copy(), momentum, convention)
    generic.move(running, *batch[:3], local_count)
    return running.mean, running.var


@pytest.mark.parametrize(
    "convention, factor",
    [("unbiased_global", 10 / 9), ("unbiased_local", 4 / 3), ("biased", 1.0)],
)
def test_each_convention_has_its_factor_of_the_variance(convention: str, factor: float) -> None:
    got = running_variance(batch_of(10), local_count=4, convention=convention)  # type: ignore[arg-type]
    np.testing.assert_allclose(got, [3.0 * factor])
    mean, var = moved(np.zeros(1), np.ones(1), batch_of(10), 0.25, 4, convention)
    expected = oracle.running(
        (np.zeros(1), np.ones(1)), np.array([2.0]), np.array([3.0]), factor, 0.25
    )
    np.testing.assert_allclose((mean, var), expected)


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(ValueError, match="`running_var` must be one of 'unbiased_global', "):
        running_variance(batch_of(10), local_count=4, convention="n-1")  # type: ignore[arg-type]


@pytest.mark.parametrize("local_count", [0, 1])
def test_a_rank_with_one_value_or_none_divides_by_one(local_count: int) -> None:
    """ChainerMN's m/max(m-1, 1)."""
    got = running_variance(batch_of(10), local_count=local_count, convention="unbiased_local")
    assert got == 3.0 * local_count


def test_an_empty_batch_changes_nothing() -> None:
    old = np.array([5.0], "float32"), np.array([7.0], "float32")
    empty = batch_of(0, mean=0, var=0)
    new = moved(*old, empty, 0.1, 0)
    np.testing.assert_array_equal(new, old)
    assert new[0].dtype == np.float32


def test_a_batch_of_one_element_moves_both() -> None:
    new = moved(np.zeros(1), np.ones(1), batch_of(1, mean=2, var=4), 0.5, 1)
    np.testing.assert_array_equal(new, [[1.0], [2.5]])


def test_cumulative_average_is_momentum_one_over_n() -> None:
    rng = np.random.default_rng(0)
    means = rng.normal(size=7)
    running = np.array([99.0]), np.array([99.0])
    for n, mean in enumerate(means, start=1):
        running = moved(*running, batch_of(10, mean, mean**2), 1 / n, 10)
    np.testing.assert_allclose(running[0], [means.mean()])
    np.testing.assert_allclose(running[1], [(means**2).mean() * 10 / 9])


def test_population_is_exact_for_unequal_batches_and_ranks() -> None:
    rng = np.random.default_rng(0)
    # Batches of different sizes and means; the last rank sees none.
    data = [
        [rng.normal(b, 1 + r, (1 + 3 * b + r, 2, 3)) for b in range(4)] if r < 2 else []
        for r in range(3)
    ]

    def estimate(communicator: ThreadCommunicator) -> BatchStatistics:
        estimator = PopulationEstimator(np.zeros(2))
        for batch in data[communicator.rank]:
            estimator.update(local_moments(batch))
        return estimator.compute(communicator)

    flat = np.concatenate([np.moveaxis(b, 1, 0).reshape(2, -1) for r in data for b in r], axis=1)
    for got in run_ranks(3, estimate):
        np.testing.assert_allclose(got.mean, flat.mean(1), rtol=1e-13)
        np.testing.assert_allclose(got.var, flat.var(1), rtol=1e-12)
        assert got.count == flat.shape[1]


def test_one_process_has_the_population_of_its_batch() -> None:
    x = np.random.default_rng(0).normal(size=(5, 2))
    estimator = PopulationEstimator(np.zeros(2))
    estimator.update(local_moments(x))
    expected = aggregate(local_moments(x), SingleProcess())
    np.testing.assert_allclose(estimator.compute().var, expected.var)
