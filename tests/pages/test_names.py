"""Each test and each file of tests that a page or claims.tsv names exists."""

import re
from functools import cache

import pytest

from tests.helpers import launch
from tests.helpers.pages import MARKDOWN

TESTS = launch.ROOT / "tests"
PUBLIC = {"check_sync", "check_vma", "test_x", "check_x"}  # no tests; x stands for any name
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


# A change's tests are those of its day.
OTHERS = {"CHANGELOG.md"}


@pytest.mark.parametrize("page", [page for page in MARKDOWN if page not in OTHERS], ids=str)
def test_tests_that_a_page_names_exist(page: str) -> None:
    lost = missing((launch.ROOT / page).read_text())
    assert not lost, f"{page} names tests that do not exist: {lost}"


# A page, the beginning of a row of one of its tables or nothing, and the tests of this claim.
CLAIMS = (TESTS / "pages/claims.tsv").read_text()


def test_tests_that_the_claims_name_exist() -> None:
    assert not missing(CLAIMS)


@pytest.mark.parametrize("line", CLAIMS.splitlines())
def test_a_claim_is_a_row_of_its_page_and_has_tests(line: str) -> None:
    page, row, tests = line.split("\t")
    assert f"\n| {row}" in (launch.ROOT / page).read_text() or not row, f"{page} has no row {row!r}"
    assert re.search(r"test|check|programs?: \w|parity/", tests), line
