"""`multibn check`, under each launcher and with what may be missing or break."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from multibn import cli
from multibn.check import command
from multibn.parity.launch import launch_command, run
from multibn.parity.worker import Error
from tests.helpers import require
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.launches

# The command, in seconds; %s is what a test does to it.
PROGRAM = """\
import os, signal, sys
from multibn import cli
from multibn.check import command

command.SECONDS, command.SIZES, command.CASES = 0.0, {False: (2, 32)}, ("float32", "uneven")
rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
%s
sys.exit(cli.main())
"""
# A smaller network, and fewer rounds of the measurements.
SMALL = """\
from multibn.check import network, timing
network.resnet50.__defaults__, timing._ROUNDS = ((1, 1, 1, 1),), (1, 1)
"""
KILLED = """\
compare = command._comparisons
def _killed(*about):
    for number, each in enumerate(compare(*about)):
        if rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield each
command._comparisons = _killed
"""
WITHOUT = {
    "torch": "found = command.importable\n"
    "command.importable = lambda name: name != 'torch' and found(name)",
    "a compiler": "from multibn.communicators.transports import shared_memory\n"
    "shared_memory.core = None; os.environ['MULTIBN_KERNELS'] = 'reference'",
}


def _run(
    tmp_path: Path, launcher: str, size: int, change: str = "", *options: str
) -> subprocess.CompletedProcess[str]:
    require.need("torch", *[launcher] if launcher else [])
    script = tmp_path / "check.py"
    script.write_text(PROGRAM % (SMALL * (change != WITHOUT["torch"]) + change))
    arguments = [str(script), "check", *options]
    return run(launch_command(launcher, size, arguments), timeout=200)


@pytest.mark.parametrize(
    "launcher, size, change, over",
    [
        ("", 1, "", "no communication (one process)"),
        ("torchrun", 1, "", "no communication (one process)"),
        ("torchrun", 3, "", "shared memory"),
        ("mpiexec", 2, "", "mpi"),
        ("mpiexec", 2, WITHOUT["torch"], "mpi"),
        ("torchrun", 2, WITHOUT["a compiler"], "gloo"),
    ],
    ids=["python", "torchrun1", "torchrun3", "mpiexec", "no torch", "no compiler"],
)
def test_report(launcher: str, size: int, change: str, over: str, tmp_path: Path) -> None:
    if "torch" in change:
        require.need("chainer")
    elif over == "shared memory":
        require.need("core")
    ran = _run(tmp_path, launcher, size, change, "--json")
    assert ran.returncode == 0, ran.stdout
    report = json.loads(ran.stdout[ran.stdout.index("{\n") : ran.stdout.rindex("}") + 1])
    assert report["verdict"] == "all results are correct"
    assert (report["ranks"]["number"], report["ranks"]["over"]) == (size, over)
    adapter = "chainer, uneven" if change == WITHOUT["torch"] else "torch, uneven"
    assert report["numbers"][adapter]["error"] <= report["numbers"][adapter]["bound"]
    timed = {what.split(",")[0]: set(each) for what, each in report["microseconds"].items()}
    peer = "MPI" if launcher == "mpiexec" else "gloo"
    sums = {f"multibn over {over}", f"{peer} allreduce"}
    expected = {f"message of {C} channels": sums for C in (64, 2048) if size > 1}
    if change != WITHOUT["torch"]:
        peers = {"multibn", "nn.BatchNorm2d"}
        expected |= {"step of layer": peers, "step of ResNet-50": peers}
    assert timed == expected


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_a_killed_rank_ends_the_check(launcher: str, tmp_path: Path) -> None:
    ran = _run(tmp_path, launcher, 2, KILLED)
    assert ran.returncode not in (0, 1) or launcher == "torchrun", ran.stdout
    assert ran.returncode != 0
    assert "verdict" not in ran.stdout
    assert re.search(r"SIGKILL|signal 9|Killed", ran.stdout), ran.stdout


@pytest.mark.parametrize("ratio, status, verdict", [(0.5, 0, "correct"), (2.0, 1, "WRONG")])
def test_the_report_for_people_ends_with_the_verdict(
    ratio: float, status: int, verdict: str, monkeypatch: Any, capsys: Any
) -> None:
    require.need("torch")
    error = Error(ratio, ratio * 1e-6, 1e-6, "dx", "float32", "torch")
    monkeypatch.setattr(command.worker, "measure", lambda *about: [error])
    monkeypatch.setattr(command, "_comparisons", lambda *about: [])
    assert cli.main(["check"]) == status
    printed = capsys.readouterr()
    row = rf"numbers      torch, float32  error {ratio * 1e-6:g}, bound 1e-06, in dx, verdict (.*)"
    assert re.findall(row, printed.out) == ["WRONG" if status else "ok"]
    assert printed.out.splitlines()[-1].endswith(verdict)
    assert re.search(r"^ *\d+ s: checking results", printed.err, re.MULTILINE)


def test_what_is_missing_is_named(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: False)
    assert cli.main(["check"]) == 2
    message = "neither torch nor chainer is installed: pip install '.[torch]' in multibn's checkout"
    assert capsys.readouterr().err == f"multibn check: {message}\n"


def test_the_page_has_the_commands_and_sizes_of_the_check() -> None:
    page = (ROOT / "docs/guides/command.md").read_text()
    examples = (command.run.__doc__ or "").rpartition("\n\n")[2].rstrip().splitlines()
    assert len(examples) == 3
    assert all(line.strip() in page for line in examples)
    for number, side in command.SIZES.values():
        assert f"{number} images of {side} x {side}" in page
    assert f"`{'`, `'.join(command.CASES)}`" in page
