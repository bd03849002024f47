"""`python -m benchmarks.gpu` on stand-ins, from end to end; and what it does with failures."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import command, device
from multibn import SingleProcess
from multibn.communicators.channel import ChannelCommunicator
from multibn.parity.launch import environment
from tests.helpers import launch
from tests.kernels.passes import takes_int_of_an_array

NEEDS = "cli dev torch triton torchrun mpiexec"


def _run_on_stand_ins() -> tuple[subprocess.CompletedProcess[str], dict[str, bytes]]:
    """The command's end, and the files that the command has written."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--stand-ins", "--seconds", "840", "--output", folder]
        command = [launch.python(), "-m", "benchmarks.gpu", *options]
        ran = launch.captured(*command, timeout=900, env=environment() | launch.VARIABLES)
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
    ends = {part["part"]: part["passed"] for part in results["parts"]}
    printed = {name: text.decode()[-2000:] for name, text in files.items() if ".txt" in name}
    assert ends == dict.fromkeys(command.PARTS, True), printed
    assert ran.returncode == 0, ran.stderr
    assert all(bool(part["rows"]) != bool(command.PARTS[part["part"]].tests)
               for part in results["parts"])  # fmt: skip
    table = files["gpu.md"].decode()
    assert "Not run on a GPU: every part ran on stand-ins" in table
    assert table in ran.stdout
    for name in ("numbers", "ResNet-50, a training step", results["date"]):
        assert name in table


# What a part does after it has written a row, and what is told of its end.
ENDS = {
    "passes": ("print('done')", r"passed \| \d+ \| done"),
    "raises": ("1 / 0", r"FAILED \| \d+ \| ZeroDivisionError: division by zero"),
    "hangs": ("time.sleep(60)", r"FAILED \| \d+ \| no result within 2 s"),
}


def test_each_end_is_told_and_takes_no_other_part_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = json.dumps({"setting": "a row", "us": 1.0})

    def script(name: str, rows: Path, stand_ins: bool) -> list[str]:
        text = f"import time; open({str(rows)!r}, 'a').write({row!r}); {ENDS[name][0]}"
        return [sys.executable, "-c", text]

    monkeypatch.setattr(command, "command_of", script)
    parts = {name: command.Part("why", 2 if name == "hangs" else 30) for name in ENDS}
    monkeypatch.setattr(command, "PARTS", parts)
    options = ["--stand-ins", "--output", str(tmp_path), "--parts"]
    monkeypatch.setattr(command, "STRETCH", 1)
    assert command.main([*options, *ENDS]) == 1
    page = (tmp_path / "gpu.md").read_text()
    for name, (_, told) in ENDS.items():
        assert re.search(rf"\| {name} \| {told} \|", page)
    assert page.count("| 1.0 | a row |") == 3
    assert "ZeroDivisionError" in (tmp_path / "raises.txt").read_text()
    assert command.main([*options, "passes"]) == 0
    assert command.main([*options, "passes", "--seconds", "0"]) == 1


def test_what_is_missing_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--output", "nowhere"])
    said = capsys.readouterr().err
    assert "missing here: a C compiler, by which Triton makes its launchers; a GPU" in said
    assert not Path("nowhere").exists()
    # Python without its site-packages.
    bare = [sys.executable, "-S", "-m", "benchmarks.gpu", "--output", "nowhere"]
    ran = launch.captured(*bare)
    assert ran.returncode == 2
    assert ran.stderr.startswith("missing here: pip install numpy array-api-compat torch triton ")


def test_each_slot_begins_with_what_matters_most() -> None:
    firsts = {part.slot: name for name, part in reversed(command.PARTS.items())}
    right = {"right": "modes", "fast": "network", "compiled": "compiled_network", "why": "profile"}
    assert firsts == right


def test_networks_and_messages_use_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here two ranks over gloo, of which one writes the rows."""
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 2)
    part = command.run("messages", 300, tmp_path, stand_ins=True)
    assert part["passed"], (tmp_path / "messages.txt").read_text()
    assert [row["setting"].partition(" of ")[0] for row in part["rows"]] == [
        "host: group.allreduce", "host: a layer's message",
    ]  # fmt: skip
    asked = {name: "--nproc-per-node=2" in command.command_of(name, tmp_path, stand_ins=False)
             for name in command.PARTS}  # fmt: skip
    assert asked == {name: part.on_all for name, part in command.PARTS.items()}


def test_the_stand_in_for_a_second_rank_costs_one_launch() -> None:
    class InPlace(SingleProcess, ChannelCommunicator):  # type: ignore[misc]
        channel = None

        def reduces_on_device(self, x: Any, /) -> bool:
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


def test_goals_are_of_what_was_measured() -> None:
    def row(
        time: str, ours: float, peer: float, passes: float = 0, **others: Any
    ) -> dict[str, Any]:
        taken = {"multibn": ours, "nn.SyncBatchNorm": peer, "nn.BatchNorm": 20.0,
                 "eight passes": passes}  # fmt: skip
        return {"time": time, "microseconds": taken, **others}

    layer = "a layer's step on the GPU"
    rows = [
        row(layer, 60.0, 100.0, 50.0, fills=True),
        row(layer, 90.0, 100.0, 1.0, fills=False),
        row("host, a chain", 140.0, 100.0),
        row("ResNet-50, a training step", 30.0, 40.0),
        row("ResNet-50, a training step, captured", 22.0, 10.0),
        row("ResNet-50, a training step, torch.compile, default", 21.0, 10.0),
    ]
    results: dict[str, Any] = {"stand_ins": False, "parts": [{"rows": rows}]}
    found = {what.partition(",")[0]: (value, most) for what, value, most in command.goals(results)}
    assert found == {
        "GPU time / nn.SyncBatchNorm's": (pytest.approx(0.54**0.5), 0.8),
        "GPU time / eight passes at a copy's speed": (1.2, 1.25),
        "host time / nn.SyncBatchNorm's": (1.4, 1.3),
        "ResNet-50's step / with nn.SyncBatchNorm": (0.75, 0.75),
        "ResNet-50's step": (1.1, 1.1),
    }
    assert command.goals({**results, "stand_ins": True}) == []


def test_the_page_has_the_times_that_are_committed() -> None:
    every = json.loads((launch.ROOT / "benchmarks/results/h200.json").read_text())
    results = every["fast"]
    page = " ".join((launch.ROOT / "docs/speed.md").read_text().split())
    layers: dict[str, list[float]] = {}
    added, eager = [], {}
    for row in command._times(results):
        setting, of_peer = (*row["shape"], row["dtype"], row["layout"]), command._ratio(row)
        if row["time"].startswith("a layer's"):
            layers.setdefault("x".join(map(str, row["shape"])), []).append(of_peer)
            eager[setting] = row["microseconds"]["multibn"]
        elif row["time"].startswith("a compiled"):
            added.append(row["microseconds"]["multibn"] - eager[setting])
    networks = {row["time"]: row for name in ("networks", "prepared")
                for row in command._times(every[name])}  # fmt: skip
    for name, row in networks.items():
        if name.startswith("host"):
            continue
        ours, peer, local = (f"{us / 1e3:.1f}" for us in row["microseconds"].values())
        peer = "not compiled" if "compile" in name else peer
        assert f"| {ours} | {peer} | {local} |" in page
    hosts = [row for row in command._times(every["prepared"]) if row["time"].startswith("host")]
    by_peer, by_local = ([command._ratio(row, name) for row in hosts]
                         for name in (command.PEER, command.LOCAL))  # fmt: skip
    assert f"host {min(by_peer):.2f} to {max(by_peer):.2f} of the time" in page
    assert f"{min(by_local):.1f} to {max(by_local):.1f} times that of a local batch norm" in page
    (first,) = (row for row in command._times(every["another"]) if row["time"] == command.NETWORK)
    others = [f"{us / 1e3:.1f}" for us in first["microseconds"].values()]
    assert "was {}, {} and {}".format(*others) in page
    for shape, (nchw, last, nchw16, last16) in layers.items():
        ratios = (f"{ratio:.2f}" for ratio in (nchw, nchw16, last, last16))
        assert f"| {shape} | {' | '.join(ratios)} |" in page
    assert f"took {min(added):.0f} to {max(added):.0f} us more" in page
