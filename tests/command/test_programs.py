"""Which rows of docs/programs.md fail; `make programs` itself is not part of `make test`."""

import pytest

from tests.programs.row import Row

NAN = float("nan")


@pytest.mark.parametrize(
    "difference, reordered, local, complaint",
    [
        (1e-12, 1e-12, 0.1, ""),
        (1e-8, 2e-9, 0.1, ""),  # the network makes as much of rounding by itself
        (1e-8, 1e-12, 0.1, "differs from one process by 1.0e-08"),
        (NAN, 1e-12, 0.1, "differs from one process by nan"),
        (1e-3, 1e-3, 0.1, "differs from itself in one process by 1.0e-03"),
        (1e-12, NAN, 0.1, "differs from itself in one process by nan"),
        (1e-12, 1e-12, 1e-12, "ranks that do not share statistics do not differ either"),
        (1e-12, None, None, ""),
        (None, None, None, ""),
    ],
)
def test_a_difference_beyond_rounding_is_a_complaint(
    difference: float | None, reordered: float | None, local: float | None, complaint: str
) -> None:
    row = Row("timm", "a model", "", difference, reordered, local).judge()
    assert row.complaint == complaint
    assert ("amplifies rounding" in row.result) == (difference == 1e-8 and not complaint)
