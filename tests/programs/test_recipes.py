"""The programs of recipes for other people's trainers: `make programs`."""

import os
from pathlib import Path

import pytest

from tests.helpers import launch, require
from tests.helpers.pages import TRAINERS
from tests.pages.test_pages import check_programs

pytestmark = pytest.mark.launches

_AT_START = "from tests.programs import operators; operators.declare()"


@pytest.mark.parametrize("page", TRAINERS)
def test_programs_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require.need("programs")
    # transformers imports torchvision, which PyPI builds for CUDA. A fork has begun already.
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    (tmp_path / "sitecustomize.py").write_text(_AT_START)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{launch.ROOT}")
    check_programs(page, tmp_path)
