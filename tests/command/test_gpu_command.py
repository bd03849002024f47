"""`python -m benchmarks.gpu` on stand-ins, from end to end; and what it does with failures."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from multibn._launch import environment
from tests.helpers import launch, require
from tests.kernels.interpreter import takes_int_of_an_array

require.need("cli", "dev", "torch", "triton", "torchrun", "mpiexec")

import benchmarks.gpu.__main__ as command  # noqa: E402
from benchmarks.gpu import parts, report  # noqa: E402


def _run_on_stand_ins() -> tuple[subprocess.CompletedProcess[str], dict[str, bytes]]:
    """The command's end, and the files that the command has written."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--stand-ins", "--seconds", "840", "--output", folder]
        ran = subprocess.run(
            [launch.python(), "-m", "benchmarks.gpu", *options],
            capture_output=True, text=True, cwd=launch.ROOT, env=environment() | launch.VARIABLES,
        )  # fmt: skip
        return ran, {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.skipif(
    takes_int_of_an_array(),
    reason="Triton's interpreter takes int() of an array, which NumPy 2.5 refuses",
)
@pytest.mark.timeout(900)  # 14 launches, where other processes take the cores
@pytest.mark.beside(_run_on_stand_ins, "cli", "triton", "torchrun", "mpiexec")
def test_every_part_runs_to_its_end_on_stand_ins(
    beside: tuple[subprocess.CompletedProcess[str], dict[str, bytes]],
) -> None:
    ran, files = beside
    results = json.loads(files["gpu.json"])
    ends = {part["part"]: (part["status"], part.get("output")) for part in results["parts"]}
    assert ends == dict.fromkeys(parts.PARTS, ("passed", None))
    assert ran.returncode == 0, ran.stderr
    assert all(part["stand-in"] and part["rows"] for part in results["parts"])
    table = files["gpu.md"].decode()
    assert "Not run on a GPU: every part ran on stand-ins" in table
    assert table in ran.stdout
    for name in ("numbers", "Triton's interpreter", "ResNet-50, a training step", results["date"]):
        assert name in table
    assert files["gpu.png"].startswith(b"\x89PNG")


# A part for each kind of end, and the status and the reason that are told.
ENDS = {
    "passes": ("passed", ""),
    "is wrong": ("failed", "1 check(s), first: a sum"),
    "raises": ("failed", "ZeroDivisionError: division by zero"),
    "is killed": ("failed", "exit status"),
    "hangs": ("timed out", "no end within"),
    "is empty": ("failed", "1 of 1 rank(s) wrote 0 row(s)"),
    "is not here": ("missing", "no_such_module"),
}
WORKER = """
import json, os, sys, time
_, name, directory = sys.argv
with open(directory + "/1.jsonl", "w", buffering=1) as file:
    if name != "is empty":
        row = {"check": "a sum", "error": 1.0, "bound": 0.0, "ok": name != "is wrong"}
        file.write(json.dumps(row) + "\\n")
    if name == "raises":
        1 / 0
    if name == "is killed":
        os.abort()
    if name == "hangs":
        time.sleep(60)
"""


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that end in different ways."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    launch_command = parts.launch_command
    monkeypatch.setattr(
        parts,
        "launch_command",
        lambda launcher, size, words: launch_command(launcher, size, [str(worker), *words[2:]]),
    )
    table = {name: parts.Part("", 30, "none") for name in ENDS}
    table["hangs"] = parts.Part("", 1, "none")
    table["is not here"] = parts.Part("", 1, "none", needs=("no_such_module",))
    monkeypatch.setattr(parts, "PARTS", table)


@pytest.mark.usefixtures("ends")
def test_each_end_is_told_and_takes_no_other_part_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--output", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    for part in results["parts"]:
        status, reason = ENDS[part["part"]]
        assert part["status"] == status
        assert reason in part.get("reason", "")
        if part["part"] != "hangs":  # a busy machine may not have started it within a second
            rows = 0 if part["part"] in ("is empty", "is not here") else 1
            assert len(part["rows"]) == rows, "what was measured before the end is kept"
    table = (tmp_path / "gpu.md").read_text()
    assert "Failed checks" in table
    assert "missing" in table
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.usefixtures("ends")
def test_only_failures_make_the_status(tmp_path: Path) -> None:
    options = ["--output", str(tmp_path), "--parts"]
    assert command.main([*options, "passes,is not here"]) == 0
    assert command.main([*options, "passes,hangs"]) == 1


@pytest.mark.usefixtures("ends")
def test_a_part_for_which_no_time_is_left_has_failed(tmp_path: Path) -> None:
    assert command.main(["--parts", "passes", "--seconds", "0", "--output", str(tmp_path)]) == 1
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert part["reason"] == "no time was left after 0 s"


def test_without_a_gpu_nothing_passes(tmp_path: Path) -> None:
    if command.machine.num_gpus():
        pytest.skip("there is a GPU")
    assert command.main(["--parts", "host waits", "--output", str(tmp_path)]) == 1
    assert "**Not run on a GPU" not in (tmp_path / "gpu.md").read_text()


def test_unknown_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--parts", "all"])
    assert "--parts must be of device, numbers, kernels" in capsys.readouterr().err


def test_goals_are_of_what_was_measured() -> None:
    def row(time: str, ours: float, peer: float, **others: Any) -> dict[str, Any]:
        taken = {"multibn": ours, "nn.SyncBatchNorm": peer, "nn.BatchNorm": 1.0}
        return {"time": time, "microseconds": taken, **others}

    layer = "a layer's step on the GPU"
    rows = [
        row(layer, 60.0, 100.0, fills=True, **{"eight passes": 50.0}),
        row(layer, 90.0, 100.0, fills=False, **{"eight passes": 1.0}),
        row("host, a chain", 140.0, 100.0),
    ]
    results: dict[str, Any] = {"stand_ins": False, "parts": [{"rows": rows}]}
    found = {g["what"].partition(",")[0]: (g["value"], g["met"]) for g in report.goals(results)}
    assert found == {
        "GPU time / nn.SyncBatchNorm's": (pytest.approx(0.54**0.5), True),
        "GPU time / eight passes at a copy's speed": (1.2, True),
        "host time / nn.SyncBatchNorm's": (1.4, False),
    }
    assert report.goals({**results, "stand_ins": True}) == []
