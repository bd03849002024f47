"""Checks, which run on several ranks, as items of pytest.

A file checks_*.py has functions `check_*(world)`, where `world` is the communicator of all ranks,
and says its launches in one line, `RUNS = on("torchrun mpiexec", 2, 3, needs="torch")`.
"""

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from tests.harness.checks import Checks
from tests.helpers import require
from tests.helpers.launch import ROOT

_F = TypeVar("_F", bound=Callable[..., None])
LAUNCHES = pytest.StashKey[dict[tuple[str, int], Checks]]()  # by launcher and number of ranks


class Runs(NamedTuple):
    """The launches that run the checks of a file, and the parts that the file imports."""

    launchers: list[str]
    sizes: tuple[int, ...]
    needs: list[str]


def on(launchers: str, *sizes: int, needs: str = "") -> Runs:
    """The launches of a file's checks. All arguments are literals: pytest reads the line alone."""
    return Runs(launchers.split(), sizes, needs.split())


@dataclass(frozen=True)
class only:
    """A check that applies to some launches: no test is made of the check and another launch.

    With `last`, the check runs after all others of its launch, because it spoils something.
    """

    launcher: str = ""  # any
    _: KW_ONLY
    sizes: Collection[int] = ()  # any
    needs: tuple[str, ...] = ()  # beside its file's
    last: bool = False

    def __call__(self, check: _F) -> _F:
        check.__dict__["only"] = self
        return check

    def applies(self, launcher: str, size: int) -> bool:
        return self.launcher in ("", launcher) and (not self.sizes or size in self.sizes)


class Check(pytest.Item):
    """A check under one launcher on one number of ranks."""

    def __init__(
        self, *, launch: tuple[str, int], check: str, needs: list[str], last: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self.launch, self.check, self.needs, self.last = launch, check, needs, last
        self.add_marker("launches")

    def runtest(self) -> None:
        """Wait for the check; fail if the check has failed, skip if a part is missing."""
        require.need(self.launch[0], *self.needs)
        complaint = self.session.stash[LAUNCHES][self.launch].complaint(self.check)
        if complaint:
            pytest.fail(complaint, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class CheckFile(pytest.File):
    def collect(self) -> Iterator[Check]:
        module = ".".join(self.path.relative_to(ROOT).with_suffix("").parts)
        runs = declared(self.path.read_text())
        checks = {"all": only()}  # a test that says what is missing
        if require.available(*runs.needs):
            found = vars(importlib.import_module(module)).items()
            checks = {n: getattr(c, "only", only()) for n, c in found if n.startswith("check_")}
        for launch in [(launcher, size) for launcher in runs.launchers for size in runs.sizes]:
            for name, its in checks.items():
                if its.applies(*launch):
                    yield Check.from_parent(
                        self,
                        name="{}[{}-{}]".format(name, *launch),
                        launch=launch,
                        check=f"{module}:{name}",
                        needs=[*runs.needs, *its.needs],
                        last=its.last,
                    )


def declared(source: str) -> Runs:
    """What the line `RUNS = on(...)` says, without an import, which may need what is missing."""
    for line in source.splitlines():
        if line.startswith("RUNS = "):
            found: Runs = eval(line.removeprefix("RUNS = "), {"on": on})
            return found
    raise ValueError('a file of checks must say its launches: RUNS = on("torchrun mpiexec", 2, 3)')
