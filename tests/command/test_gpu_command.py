"""`python -m benchmarks.gpu` on stand-ins, from end to end; and what it does with failures."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from multibn._launch import environment
from tests.helpers import launch, require
from tests.kernels.passes import takes_int_of_an_array

require.need("cli", "dev", "torch", "triton", "torchrun", "mpiexec")

from benchmarks import machine  # noqa: E402
from benchmarks.gpu import __main__ as start  # noqa: E402
from benchmarks.gpu import command, device, parts  # noqa: E402
from multibn._launch import Written, run_workers  # noqa: E402


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
@pytest.mark.timeout(900)  # 12 launches, where other processes take the cores
@pytest.mark.beside(_run_on_stand_ins, "cli", "triton", "torchrun", "mpiexec")
def test_every_part_runs_to_its_end_on_stand_ins(
    beside: tuple[subprocess.CompletedProcess[str], dict[str, bytes]],
) -> None:
    ran, files = beside
    results = json.loads(files["gpu.json"])
    ends = {part["part"]: (part["status"], part.get("output")) for part in results["parts"]}
    assert ends == dict.fromkeys(parts.PARTS, ("passed", ""))
    assert ran.returncode == 0, ran.stderr
    assert all(part["rows"] for part in results["parts"])
    table = files["gpu.md"].decode()
    assert "Not run on a GPU: every part ran on stand-ins" in table
    assert table in ran.stdout
    for name in ("numbers", "ResNet-50, a training step", results["date"]):
        assert name in table


# A generator of rows for each kind of end, and the status and the reason that are told.
ENDS = {
    "passes": ("passed", ""),
    "is_wrong": ("failed", "1 check(s), first: a sum"),
    "raises": ("failed", "ZeroDivisionError: division by zero"),
    "hangs": ("failed", "no result within 1 s"),
    "is_empty": ("failed", "no rank wrote a row"),
    "is_not_here": ("missing", "no_such_module"),
}
ROWS = """
import sys, time
from multibn._launch import write

name, directory = sys.argv[-2:]
rows = [{"check": "a sum", "error": 1.0, "bound": 0.0, "ok": name != "is_wrong"}]
print(rows, flush=True)
if name == "raises":
    1 / 0
if name == "hangs":
    time.sleep(60)
write(directory, 0, {}, {"rows": [] if name == "is_empty" else rows})
"""


def test_each_end_is_told_and_takes_no_other_part_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "rows.py"
    script.write_text(ROWS)

    def run_script(
        name: str, launcher: str, size: int, words: list[str], **options: Any
    ) -> list[Written]:
        return run_workers(name, launcher, size, [str(script), words[-1]], **options)

    monkeypatch.setattr(parts, "run_workers", run_script)
    table = {name: parts.Part("", 1 if name == "hangs" else 30) for name in ENDS}
    table["is_not_here"] = parts.Part("", 1, needs=("no_such_module",))
    monkeypatch.setattr(parts, "PARTS", table)
    assert command.main(["--output", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    for part in results["parts"]:
        status, reason = ENDS[part["part"]]
        assert part["status"] == status
        assert reason in part["reason"]
    page = (tmp_path / "gpu.md").read_text()
    assert "FAILED a sum: error 1, bound 0" in page
    assert "| is_not_here | missing | 0 | 0 | no_such_module |" in page
    printed = capsys.readouterr().err
    assert "ZeroDivisionError" in printed
    assert printed.count("'check': 'a sum'") >= 1, "what was measured before the end is printed"
    options = ["--output", str(tmp_path), "--parts"]
    assert command.main([*options, "passes", "is_not_here"]) == 0
    assert command.main([*options, "passes", "--seconds", "0"]) == 1
    assert "| passes | failed | 0 | 0 | no time was left |" in (tmp_path / "gpu.md").read_text()


def test_what_is_missing_is_said_at_once() -> None:
    """By a Python without any library: -S leaves out the packages of an environment."""
    begun = time.monotonic()
    asked = [sys.executable, "-S", "-m", "benchmarks.gpu", "--output", "nowhere"]
    ran = subprocess.run(asked, capture_output=True, text=True, cwd=launch.ROOT, timeout=60)
    assert ran.returncode == 2
    assert time.monotonic() - begun < 10  # 0.2 s where no other process takes the cores
    lines = ran.stderr.splitlines()
    packages = ("numpy", "array-api-compat", "torch", "triton")
    assert lines[:4] == [f"{name} is missing: pip install {name}" for name in packages]
    assert ran.stdout == ""


def test_a_missing_gpu_or_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.num_gpus():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(start.shutil, "which", lambda name: None)
    said = list(start.missing([]))
    assert any(line.startswith("a C compiler is missing, by which Triton") for line in said)
    assert said[-1].startswith("a GPU is missing: ")
    assert list(start.missing(["--stand-ins"])) == []

    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802 (CUDA's names)
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
            count._obj.value = self.num_gpus
            return 0

        num_gpus = 0

    monkeypatch.setattr(start.ctypes, "CDLL", lambda name: Driver())
    assert list(start.missing([]))[-1] == "a GPU is missing: the driver finds none"
    monkeypatch.setattr(Driver, "num_gpus", 1)
    assert not any("GPU is missing" in line for line in start.missing([]))


def test_slots_have_all_parts_and_fit_in_ten_minutes() -> None:
    assert {name for slot in parts.SLOTS.values() for name in slot.parts} == set(parts.PARTS)
    assert parts.SLOTS["fast"].parts[:2] == ("device", "resnet")


def test_a_common_failure_is_shown_ten_times_and_counted() -> None:
    rows = [{"check": f"test {n}", "error": 1.0, "bound": 0.0, "ok": False} for n in range(400)]
    part = {"part": "kernels", "status": "failed", "reason": "", "rows": rows}
    facts = {"python": "3", "versions": {}}
    page = list(command._page({"stand_ins": False, "date": "", "machine": facts, "parts": [part],
                               "slot": "right"}))  # fmt: skip
    failures = [text for text in page if text.startswith("FAILED")]
    assert len(failures) == 11
    assert failures[0] == "FAILED test 0: error 1, bound 0"
    assert failures[-1] == "FAILED 390 more"
    assert any(text.startswith("Slot right: whether the numbers are right") for text in page)


def test_the_stand_in_for_a_second_rank_costs_one_launch() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from multibn import SingleProcess
    from multibn.communicators.lines import LineCommunicator

    class InPlace(SingleProcess, LineCommunicator):
        lines = None

        def takes(self, x: Any, /) -> bool:
            return True

        def allreduce_in_place(self, x: Any, /) -> Any:
            return x

    launches: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            launches.append(str(f))
            return f(*args, **(kwargs or {}))

    for over in (SingleProcess(), InPlace()):
        numbers = torch.ones(3)
        launches.clear()
        with Operations():
            summed = device.Equal(over).allreduce_in_place(numbers)
        assert launches == ["aten.mul_.Tensor"]
        assert summed.tolist() == [2.0] * 3


def test_without_a_gpu_nothing_passes(tmp_path: Path) -> None:
    if machine.num_gpus():
        pytest.skip("there is a GPU")
    assert command.main(["--parts", "host waits", "--output", str(tmp_path)]) == 1
    assert "**Not run on a GPU" not in (tmp_path / "gpu.md").read_text()


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--parts", "all", "--output", "nowhere"])
    assert "argument --parts: invalid choice: 'all'" in capsys.readouterr().err


def test_goals_are_of_what_was_measured() -> None:
    def row(
        time: str, ours: float, peer: float, passes: float = 0, **others: Any
    ) -> dict[str, Any]:
        taken = {"multibn": ours, "nn.SyncBatchNorm": peer, "eight passes": passes}
        return {"time": time, "microseconds": taken, **others}

    layer = "a layer's step on the GPU"
    rows = [
        row(layer, 60.0, 100.0, 50.0, fills=True),
        row(layer, 90.0, 100.0, 1.0, fills=False),
        row("host, a chain", 140.0, 100.0),
    ]
    results: dict[str, Any] = {"stand_ins": False, "parts": [{"rows": rows}]}
    found = {g["what"].partition(",")[0]: (g["value"], g["met"]) for g in command.goals(results)}
    assert found == {
        "GPU time / nn.SyncBatchNorm's": (pytest.approx(0.54**0.5), True),
        "GPU time / eight passes at a copy's speed": (1.2, True),
        "host time / nn.SyncBatchNorm's": (1.4, False),
    }
    assert command.goals({**results, "stand_ins": True}) == []
