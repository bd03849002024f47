"""The layers of flax: on four devices, which one process of its own has, and in this process."""

from pathlib import Path

import pytest

from tests.flax_backend import on_devices
from tests.helpers import launch, pages

NEEDS = "flax"


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.beside(run, "flax"))
        for files, run in on_devices.RUNS.items()
        for check in on_devices.checks(files)
    ],
)
def test_on_four_devices(check: str, beside: dict[str, str]) -> None:
    assert not beside[check], beside[check]


def test_the_program_of_the_guide_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = "docs/guides/flax.md"
    ((name, program),) = pages.programs(page).items()
    (command,) = pages.commands(page)
    Path(tmp_path, name).write_text(program)
    printed = launch.printed("-W", "error", str(tmp_path / name), JAX_PLATFORMS="cpu")
    assert command.line == f"python {name}"
    assert printed.splitlines() == command.printed
