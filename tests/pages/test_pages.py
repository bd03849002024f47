"""The programs on the pages and the notebook's cells print what the pages and the notebook show."""

import json
import re
import shlex
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from multibn.parity import launch as _launch
from tests.helpers import launch
from tests.helpers.pages import MARKDOWN, TRAINERS, commands, programs

NEEDS = "torch chainer torchrun mpiexec"

pytestmark = pytest.mark.launches
# The program of the guide for flax runs in flax_backend/test_flax.py, with warnings as errors.
ELSEWHERE = {*TRAINERS, "docs/guides/flax.md"}
PAGES = [page for page in MARKDOWN if commands(page) and page not in ELSEWHERE]


def _write_programs(page: str, folder: Path) -> None:
    for name, program in programs(page).items():
        (folder / name).write_text(program)


def _arguments(line: str) -> list[str]:
    """The command in this environment: its own launchers and Python."""
    name, *arguments = shlex.split(line)
    python = _launch.launch_command("", 1, [])[0]
    own = {
        "python": [python],
        "torchrun": _launch.launch_command("torchrun", 1, [])[:3],
        "mpiexec": _launch.launch_command("mpiexec", 1, [])[:1],
        "accelerate": [python, "-m", "accelerate.commands.accelerate_cli"],
    }
    return [*own[name], *(python if argument == "python" else argument for argument in arguments)]


def test_pages_with_commands_are_found() -> None:
    assert "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_programs_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    check_programs(page, tmp_path)


def check_programs(page: str, tmp_path: Path) -> None:
    """Run the commands of the page on its programs."""
    _write_programs(page, tmp_path)
    for line, printed in commands(page):
        assert printed, f"{page} does not show what {line} prints"
        # Not by this process's change of directory: the launches beside would start there.
        command = ["env", f"--chdir={tmp_path}", *_arguments(line)]
        for _ in range(2):
            result = _launch.run(command, timeout=launch.HANGS, variables=launch.VARIABLES)
            if launch.NOT_STARTED not in result.stdout:
                break
        assert result.returncode == 0, result.stdout
        shown = [row for row in result.stdout.splitlines() if row in printed]
        assert shown == printed, f"{line} printed\n{result.stdout}"


def test_two_launchers_with_one_rendezvous_train_together(tmp_path: Path) -> None:
    """The command of docs/guides/multi-node.md, on two "machines" that are this one."""
    _write_programs("README.md", tmp_path)
    text = (launch.ROOT / "docs/guides/multi-node.md").read_text()
    (line,) = [row for row in text.splitlines() if row.startswith("torchrun ")]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    line = line.replace("node1:29500", f"localhost:{port}").replace("node 4", "node 1")
    command = _arguments(line.replace("train.py", str(tmp_path / "train.py")))
    losses = commands("README.md")[0].printed
    variables = _launch.environment() | launch.VARIABLES
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(_launch.started(command, variables=variables)) for _ in range(2)
        ]
        outputs = [launcher.communicate(timeout=launch.HANGS)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    shown = [row for row in "\n".join(outputs).splitlines() if row in losses]
    assert shown == losses, outputs


def test_a_script_ends_although_a_thread_does_not(tmp_path: Path) -> None:
    """The way out of docs/guides/when-it-fails.md, where the interpreter waits for a thread."""
    text = (launch.ROOT / "docs/guides/when-it-fails.md").read_text()
    (way_out,) = re.findall(r"end the script with\s`(.*?)`", text)
    program = programs("README.md")["train.py"]
    waits = "import threading; threading.Thread(target=threading.Event().wait).start()"
    script = tmp_path / "train.py"
    script.write_text(f"{program}{waits}\nimport os, sys; {way_out}\n")
    command = _arguments(f"torchrun --standalone --nproc-per-node 2 {script}")
    ran = _launch.run(command, timeout=launch.HANGS, variables=launch.VARIABLES)
    assert ran.returncode == 0, ran.stdout
    losses = commands("README.md")[0].printed
    assert [row for row in ran.stdout.splitlines() if row in losses] == losses


NOTEBOOK = launch.ROOT / "examples/two_ranks.ipynb"


@pytest.mark.launches
def test_the_cells_print_what_the_notebook_shows(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code, shown = [f"import os; os.chdir({str(tmp_path)!r})"], []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        magic, _, rest = source.partition("\n")
        if magic.startswith("%%writefile "):
            (tmp_path / magic.removeprefix("%%writefile ")).write_text(rest)
        else:
            code.append(source)
        shown += [line for output in cell["outputs"] for line in output["text"]]
    assert shown
    assert launch.printed("-c", "\n".join(code)) == "".join(shown)
