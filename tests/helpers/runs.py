"""Tests that run checks on several ranks.

A module of checks has functions `check_*(world)`; `world` is the communicator of all ranks.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeVar

import pytest

from tests.helpers import require

_F = TypeVar("_F", bound=Callable[..., None])


class Run(NamedTuple):
    """The launches that run the checks of a module, and the parts that the module imports."""

    module: str  # without its package
    launchers: tuple[str, ...]
    sizes: tuple[int, ...]
    needs: tuple[str, ...] = ()


class Only(NamedTuple):
    """Which of a module's launches run a check, and what the check needs beside its module."""

    launcher: str = ""  # any
    sizes: Collection[int] = ()  # any
    needs: tuple[str, ...] = ()

    def applies(self, launcher: str, size: int) -> bool:
        return self.launcher in ("", launcher) and (not self.sizes or size in self.sizes)


def only(
    launcher: str = "", *, sizes: Collection[int] = (), needs: tuple[str, ...] = ()
) -> Callable[[_F], _F]:
    """A check that applies to some launches: no test is made of the check and another launch."""

    def mark(check: _F) -> _F:
        check.__dict__["only"] = Only(launcher, sizes, needs)
        return check

    return mark


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


def _checks(module: str, needs: tuple[str, ...]) -> dict[str, Only]:
    if not require.available(*needs):
        return {"all": Only()}  # a test that says what is missing
    found = vars(importlib.import_module(module)).items()
    return {name: getattr(c, "only", Only()) for name, c in found if name.startswith("check_")}


def _tests(package: str | None, runs: Iterable[Run]) -> Iterator[object]:
    for run in runs:
        module = f"{package}.{run.module}"
        checks = _checks(module, run.needs)
        launches = [(launcher, size) for launcher in run.launchers for size in run.sizes]
        for launcher, size in launches:
            for check, its in checks.items():
                if its.applies(launcher, size):
                    needs = run.needs + its.needs
                    mark = pytest.mark.check(launcher, size, f"{module}:{check}", needs)
                    name = f"{launcher}-{size}-{run.module}-{check}"
                    yield pytest.param((launcher, *needs), id=name, marks=mark)
