"""Each test and each file of tests that a page names exists, in the page's comments too."""

import re
from functools import cache

import pytest

from tests.helpers import launch
from tests.helpers.pages import MARKDOWN

TESTS = launch.ROOT / "tests"
PUBLIC = {"check_sync", "test_x", "check_x"}  # no tests; x stands for any name
# A file in the rooms of tests/, and perhaps a function of this file; or a function by itself.
FILE = r"((?:\w+/)+(?:test|checks)_\w+)(?:\.py)?`?(?:: `?(\w+))?"
FUNCTION = r"(?<![\w/.])((?:test|check)_\w+)(?![\w/]|\.py)"


@cache
def _functions() -> dict[str, set[str]]:
    """The functions of each file, by the file's path in tests/ without its suffix."""
    return {
        str(path.relative_to(TESTS).with_suffix("")): set(
            re.findall(r"^def (\w+)\(", path.read_text(), re.MULTILINE)
        )
        for path in TESTS.rglob("*.py")
    }


def missing(text: str) -> list[str]:
    """Names of tests in the text that are no tests."""
    files = _functions()
    lost = []
    for path, name in re.findall(FILE, text):
        path = path.removeprefix("tests/")
        if path not in files:
            lost.append(f"{path}.py")
        elif re.match("test_|check_", name) and name not in files[path]:
            lost.append(f"{path}.py: {name}")
    known = set().union(PUBLIC, *files.values())
    return lost + [name for name in re.findall(FUNCTION, text) if name not in known]


# A change's tests are those of its day; the calls of a step are none.
OTHERS = {"CHANGELOG.md", "docs/step.md"}


@pytest.mark.parametrize("page", [page for page in MARKDOWN if page not in OTHERS], ids=str)
def test_tests_that_a_page_names_exist(page: str) -> None:
    lost = missing((launch.ROOT / page).read_text())
    assert not lost, f"{page} names tests that do not exist: {lost}"


@pytest.mark.parametrize("page", MARKDOWN, ids=str)
def test_a_comment_names_rows_of_the_table_above(page: str) -> None:
    """A line is the beginning of a row and its tests; rows without tests have no line."""
    above, *comments = (launch.ROOT / page).read_text().split("<!-- tests of this table\n")
    for comment in comments:
        table = above.rstrip().rpartition("\n\n")[2]
        lines, _, above = comment.partition("\n-->")
        for line in lines.splitlines():
            row, _, tests = line.rpartition(" | ")
            assert f"\n| {row}" in table, f"{page}: no row of the table begins with {row!r}"
            assert re.search(r"test|check|programs?: \w|parity/", tests), f"{page}: {line}"
