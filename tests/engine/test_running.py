"""What goes into a running variance."""

import numpy as np
import pytest

from multibn.engine import running_variance
from multibn.engine.statistics import BatchStatistics

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
