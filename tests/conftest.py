"""The parts that the test run must find, and the launches whose ranks run checks.

A test with the mark `check` (tests/helpers/runs.py) asks how a check on the ranks of a launch has
ended. All checks of one launcher and number of ranks share a launch, which runs beside the tests
that need no launch. So does the function of a mark `beside`, after the launches.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers import launch, require
from tests.helpers.checks import Checks

Launch = tuple[str, int]  # launcher and number of ranks
_LAUNCHES = pytest.StashKey[dict[Launch, Checks]]()
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


def _check(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("check")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks, launch by launch, after the tests that they run beside; then what runs alone.

    The other tests of tests/distributed start ranks of their own: when most launches have ended.
    """
    launches = list(dict.fromkeys(mark.args[:2] for item in items if (mark := _check(item))))

    def turn(item: pytest.Item) -> tuple[bool, int]:
        mark = _check(item)
        alone = item.get_closest_marker("alone") is not None
        if item.get_closest_marker("beside"):
            return alone, 2 + len(launches)
        if mark:
            return alone, 2 + launches.index(mark.args[:2])
        return alone, int("tests/distributed/" in item.nodeid)

    items.sort(key=turn)


def _launches(items: Sequence[pytest.Item]) -> dict[Launch, Checks]:
    """The selected checks that can run here."""
    names: dict[Launch, list[str]] = {}
    for item in items:
        if mark := _check(item):
            launcher, size, name, needs = mark.args
            if require.available(launcher, *needs):
                names.setdefault((launcher, size), []).append(name)
    return {launch: Checks(*launch, names[launch]) for launch in names}


def _beside(items: Sequence[pytest.Item]) -> list[Callable[[], Any]]:
    """The functions of the selected tests that can run here, each once."""
    marks = filter(None, (item.get_closest_marker("beside") for item in items))
    return list(dict.fromkeys(mark.args[0] for mark in marks if require.available(*mark.args[1:])))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    items = [] if session.config.option.collectonly else session.items
    session.stash[_LAUNCHES] = launches = _launches(items)
    with (
        launch.forked_python(),
        ThreadPoolExecutor(1) as pool,  # one launch at a time: it has more ranks than one
    ):
        for checks in launches.values():
            pool.submit(checks.run)
        session.stash[_BESIDE] = {function: pool.submit(function) for function in _beside(items)}
        try:
            return (yield)
        finally:
            for checks in launches.values():
                checks.stop()
            pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def complaint(request: pytest.FixtureRequest) -> str:
    """What the ranks of this check have to say: "" if it passed on all of them."""
    mark = _check(request.node)
    assert mark
    launcher, size, name, _ = mark.args
    return request.session.stash[_LAUNCHES][launcher, size].complaint(name)


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Any:
    """The result of the function in this test's mark `beside`; raises its exception."""
    mark = request.node.get_closest_marker("beside")
    require.need(*mark.args[1:])
    return request.session.stash[_BESIDE][mark.args[0]].result()
