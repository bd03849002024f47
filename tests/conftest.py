"""The parts that the test run must find, and the launches whose ranks run checks.

An item of a file checks_*.py (tests/harness/runs.py) asks how a check on the ranks of a launch has
ended. All checks of one launcher and number of ranks share a launch, which runs beside the tests
that need no launch. So does the function of a mark `beside`, after the launches.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.checks import Checks
from tests.harness.runs import LAUNCHES, Check, CheckFile
from tests.helpers import launch, require

_BESIDE = pytest.StashKey[dict[Callable[[], Any], Future[Any]]]()

# Each process that compiles by inductor would ask the compiler ten times for what the processor
# has, and start a pool of processes: 17 s of processor time.
_INDUCTOR = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default="",
        help="comma-separated frameworks and launchers whose absence fails tests instead of "
        f"skipping them: {', '.join(require.PROBES)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    require.set_required(name for name in config.getoption("--require").split(",") if name)
    os.environ.update(_INDUCTOR)  # before torch is imported, and for the ranks


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.match("checks_*.py"):
        return CheckFile.from_parent(parent, path=file_path)
    return None


class _TestModule(pytest.Module):
    """A file of tests, which is not imported where a part that its `NEEDS` names is missing."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        named = re.search(r'^NEEDS = "(.*)"', self.path.read_text(), re.MULTILINE)
        require.need(*(named[1].split() if named else ()))
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = _TestModule.from_parent(parent, path=module_path)
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks, launch by launch, after the tests that they run beside; then what runs alone.

    Tests that start ranks of their own come when most launches have ended.
    """
    launches = list(dict.fromkeys(item.launch for item in items if isinstance(item, Check)))

    def turn(item: pytest.Item) -> tuple[bool, int, bool]:
        alone = item.get_closest_marker("alone") is not None
        if item.get_closest_marker("beside"):
            return alone, 2 + len(launches), False
        if isinstance(item, Check):
            return alone, 2 + launches.index(item.launch), item.last
        return alone, int(item.get_closest_marker("launches") is not None), False

    items.sort(key=turn)


def _launches(items: Sequence[pytest.Item]) -> dict[tuple[str, int], Checks]:
    """The selected checks that can run here."""
    names: dict[tuple[str, int], list[str]] = {}
    for item in items:
        if isinstance(item, Check) and require.available(item.launch[0], *item.needs):
            names.setdefault(item.launch, []).append(item.check)
    return {launch: Checks(*launch, names[launch]) for launch in names}


def _beside(items: Sequence[pytest.Item]) -> list[Callable[[], Any]]:
    """The functions of the selected tests that can run here, each once."""
    marks = filter(None, (item.get_closest_marker("beside") for item in items))
    return list(dict.fromkeys(mark.args[0] for mark in marks if require.available(*mark.args[1:])))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    items = [] if session.config.option.collectonly else session.items
    with (
        launch.forked_python(),
        ThreadPoolExecutor(1) as pool,  # one launch at a time: it has more ranks than one
    ):
        session.stash[LAUNCHES] = launches = _launches(items)
        for checks in launches.values():
            pool.submit(checks.run)
        session.stash[_BESIDE] = {function: pool.submit(function) for function in _beside(items)}
        try:
            return (yield)
        finally:
            for checks in launches.values():
                checks.stop()
            pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No test sees what an earlier one has compiled, nor the functions that Dynamo gave up."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Any:
    """The result of the function in this test's mark `beside`; raises its exception."""
    mark = request.node.get_closest_marker("beside")
    require.need(*mark.args[1:])
    return request.session.stash[_BESIDE][mark.args[0]].result()
