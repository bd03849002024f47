"""A plugin of pytest, and a rank of its checks: which tests run which lines."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.harness import checks
from tests.harness.runs import Check

FOLDER = os.environ.get("MULTIBN_RECORD")  # to write to
checks.DEADLINE = 60.0  # a mistake may make ranks wait for each other


def _started() -> coverage.Coverage:
    lines = coverage.Coverage(f"{FOLDER}/lines", True, config_file=False, include=["*/multibn/*"])
    lines.start()
    return lines


class _Recorder:
    def __init__(self) -> None:
        self._lines, self._seconds = _started(), dict[str, float]()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what spends its time in processes of its own, or is about time."""
        items[:] = [i for i in items if not [*i.iter_markers("beside"), *i.iter_markers("alone")]]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._lines.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = report.duration if report.passed else float("inf")
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + took

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._lines.stop()
        self._lines.save()
        # How long a test waits for a check says nothing.
        tests = {
            self._context(item): (item.nodeid, 1.0 if isinstance(item, Check) else took)
            for item in session.items
            if (took := self._seconds.get(item.nodeid, float("inf"))) < float("inf")
        }
        Path(f"{FOLDER}/tests").write_text(json.dumps(tests))

    def _context(self, item: pytest.Item) -> str:
        if isinstance(item, Check):
            return "{} {} {}".format(*item.launch, item.check)
        return item.nodeid


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER:
        checks.WORKER = __name__
        config.pluginmanager.register(_Recorder())


def _on_rank(launcher: str, directory: str) -> None:
    from tests.harness import worker

    lines, run = _started(), worker._run

    def recorded(name: str, world: Any) -> Any:
        lines.switch_context(f"{launcher} {world.size} {name}")
        return run(name, world)

    worker._run = recorded
    worker.main(launcher, directory)
    lines.stop()
    lines.save()


if __name__ == "__main__":
    _on_rank(*sys.argv[1:])
