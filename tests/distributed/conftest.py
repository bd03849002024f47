"""Launches the ranks of test_distributed.py beside the tests that need no launch."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers import require
from tests.helpers.checks import Checks

_LAUNCHES = pytest.StashKey[dict[tuple[str, int], Checks]]()
AT_ONCE = 1  # launches


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks after the tests that they run beside, then the tests that run alone."""

    def turn(item: pytest.Item) -> int:
        marks = [item.get_closest_marker(name) is not None for name in ("check", "alone")]
        return marks[0] + 2 * marks[1]

    items.sort(key=turn)


def _launches(items: Sequence[pytest.Item]) -> dict[tuple[str, int], Checks]:
    """The selected checks that can run here, by launcher and number of ranks."""
    names: dict[tuple[str, int], list[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("check"):
            launcher, size, name, needs = mark.args
            if require.available(launcher, *needs):
                names.setdefault((launcher, size), []).append(name)
    return {key: Checks(*key, names[key]) for key in names}


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    launches = {} if session.config.option.collectonly else _launches(session.items)
    session.stash[_LAUNCHES] = launches
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for checks in launches.values():
            pool.submit(checks.run)
        try:
            return (yield)
        finally:
            for checks in launches.values():
                checks.stop()


@pytest.fixture
def complaint(request: pytest.FixtureRequest) -> str:
    """What the ranks of this check have to say: "" if it passed on all of them."""
    launcher, size, name, _ = request.node.get_closest_marker("check").args
    return request.session.stash[_LAUNCHES][launcher, size].complaint(name)
