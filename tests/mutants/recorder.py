"""A plugin of pytest, and a rank of its checks: which tests run which lines, and how long."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import coverage
import pytest

FOLDER = os.environ.get("MULTIBN_RECORD")  # to write to
LINES = coverage.Coverage(f"{FOLDER}/lines", True, config_file=False, include=["*/multibn/*"])
if FOLDER:
    LINES.start()  # before the package is imported

from tests.harness import checks, worker  # noqa: E402

checks.DEADLINE = 60.0  # a mistake may make ranks wait for each other


class _Recorder:
    seconds = dict[str, float]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        LINES.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # How long a test waits for a check says nothing.
        took = 0.3 if "/checks_" in report.nodeid else report.duration
        took = took if report.passed else float("inf")
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + took

    def pytest_sessionfinish(self) -> None:
        LINES.stop()
        LINES.save()
        passed = {test: s for test, s in self.seconds.items() if s < float("inf")}
        Path(f"{FOLDER}/seconds").write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER:
        checks.WORKER = __name__
        config.pluginmanager.register(_Recorder())


def _on_rank(launcher: str, directory: str) -> None:
    run = worker._run

    def recorded(name: str, world: Any) -> Any:
        file, check = name.replace(".", "/").split(":")
        LINES.switch_context(f"{file}.py::{check}[{launcher}-{world.size}]")
        return run(name, world)

    worker._run = recorded
    worker.main(launcher, directory)
    LINES.stop()
    LINES.save()


if __name__ == "__main__":
    _on_rank(*sys.argv[1:])
