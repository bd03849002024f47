"""ChainerMN's trainer with multibn's links in place of ChainerMN's own."""

import pytest

from tests.helpers.runs import Run, assert_passed, on_ranks

RUNS = [Run("checks_chainermn_trainer", ("mpiexec",), (2,), ("chainer",))]


@on_ranks(__package__, RUNS)
def test_on_ranks(needs: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    assert_passed(needs, request)
