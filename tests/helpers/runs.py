"""Tests that run checks on several ranks.

A module of checks has functions `check_*(world)`; `world` is the communicator of all ranks.
"""

import importlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

from tests.helpers import require


class Run(NamedTuple):
    """The launches that run the checks of a module, and the parts that the module imports."""

    module: str  # without its package
    launchers: tuple[str, ...]
    sizes: tuple[int, ...]
    needs: tuple[str, ...] = ()


def on_ranks(package: str | None, runs: Iterable[Run]) -> pytest.MarkDecorator:
    """Make one test of each check and launch of the runs, whose modules are in `package`.

    The test has an argument `needs`, the launcher and the parts that it needs, and calls
    `assert_passed(needs, request)`.
    """
    return pytest.mark.parametrize("needs", [*_tests(package, runs)])


def assert_passed(needs: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """Wait for the check of this test; fail if the check has failed, skip if a part is missing."""
    require.need(*needs)
    complaint = request.getfixturevalue("complaint")
    assert not complaint, complaint


def _checks(module: str, needs: tuple[str, ...]) -> list[str]:
    if not require.available(*needs):
        return ["all"]  # a test that says what is missing
    return [name for name in vars(importlib.import_module(module)) if name.startswith("check_")]


def _tests(package: str | None, runs: Iterable[Run]) -> Iterator[object]:
    for run in runs:
        module = f"{package}.{run.module}"
        checks = _checks(module, run.needs)
        for launcher in run.launchers:
            for size in run.sizes:
                for check in checks:
                    mark = pytest.mark.check(launcher, size, f"{module}:{check}", run.needs)
                    name = f"{launcher}-{size}-{run.module}-{check}"
                    yield pytest.param((launcher, *run.needs), id=name, marks=mark)
