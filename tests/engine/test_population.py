"""Running statistics and the population estimator."""

from typing import Any

import numpy as np
import pytest

from multibn.engine import running_variance
from multibn.engine.statistics import BatchStatistics
from multibn.kernels import Running, generic
from multibn.parity import oracle


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
