"""The programs of recipes for other people's trainers: `make programs`."""

from pathlib import Path

import pytest

from tests.helpers import require
from tests.helpers.pages import TRAINERS
from tests.pages.test_pages import check_programs

pytestmark = pytest.mark.launches


@pytest.mark.parametrize("page", TRAINERS)
def test_programs_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    require.need("programs")
    check_programs(page, tmp_path)
