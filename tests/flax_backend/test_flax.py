"""The layers of flax: on four devices, which one process of its own has, and in this process."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.flax_backend import NUM_DEVICES
from tests.helpers import launch, pages

NEEDS = "flax"

# Half of the files each: less than a minute of processor time.
FILES = sorted(map(str, Path(__file__).parent.glob("devices_*.py")))
PYTEST = ["-q", "-p", "no:cacheprovider", *("-o", "python_files=devices_*.py")]
PYTEST += ["-o", "python_functions=check_*"]


def _run(*files: str) -> subprocess.CompletedProcess[str]:
    """Run the functions check_* of these files in a process with four devices."""
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return launch.captured(sys.executable, "-m", "pytest", *PYTEST, *files, env=variables)


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(half, marks=pytest.mark.beside(partial(_run, *half), "flax"), id=half[0])
        for half in (FILES[:2], FILES[2:])
    ],
)
def test_on_four_devices(of: list[str], beside: subprocess.CompletedProcess[str]) -> None:
    assert beside.returncode == 0, f"{of}\n{beside.stdout}{beside.stderr}"


def test_the_program_of_the_guide_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = "docs/guides/flax.md"
    ((name, program),) = pages.programs(page).items()
    (command,) = pages.commands(page)
    Path(tmp_path, name).write_text(program)
    printed = launch.printed("-W", "error", str(tmp_path / name), JAX_PLATFORMS="cpu")
    assert command.line == f"python {name}"
    assert printed.splitlines() == command.printed
