"""Checks and times the GPU path on the GPUs of this machine, in four slots of ten minutes each.

Each part is a process of its own: what ends or hangs one part leaves the others. Writes what a part
prints to PART.txt, times to gpu.json after each part, and gpu.md at the end. The exit status is 0
only if no part has failed.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.tables import markdown
from multibn._platform import importable
from multibn.parity import launch as _launch

ROOT = Path(__file__).parents[2]
OURS, PEER, LOCAL = "multibn", "nn.SyncBatchNorm", "nn.BatchNorm"
_LAYER = "a layer's step on the GPU"
NETWORK = "ResNet-50, a training step"
# A machine that runs tests is busy, and a hang there is another test's business.
STRETCH = 3
Row = Mapping[str, Any]


class Part(NamedTuple):
    """One part: its slot, the seconds that it may take, and its tests.

    A part without tests is a generator of rows in times.py. It runs on one GPU, or on all of them.
    """

    slot: str
    seconds: float
    tests: Sequence[str] = ()
    on_all: bool = False


# Of each slot the most valuable first.
PARTS = {
    "modes": Part("right", 90, ["benchmarks/gpu/right.py::test_modes"]),
    "kernels": Part("right", 180, [f"tests/kernels/{name}.py" for name in (
        "test_passes", "test_moments", "test_steps",
        "triton_passes", "triton_steps", "triton_prepared")]),
    **{name: Part("right", seconds, [f"benchmarks/gpu/right.py::test_{name}"])
       for name, seconds in (("numbers", 120), ("graphs", 60), ("host_waits", 60), ("ranks", 180))},
    "network": Part("fast", 90, on_all=True),
    "captured_network": Part("fast", 90, on_all=True),
    "messages": Part("fast", 30, on_all=True),
    "host": Part("fast", 60, on_all=True),
    "layers": Part("fast", 150),
    "compiled_network": Part("compiled", 150, on_all=True),
    "compiled_network_in_graphs": Part("compiled", 150, on_all=True),
    "compiled": Part("compiled", 120, ["benchmarks/gpu/right.py::test_compiled"]),
    "compiled_layers": Part("compiled", 150),
    "profile": Part("why", 90),
    "sweep": Part("why", 400),
}  # fmt: skip
SLOTS = {
    "right": "whether the numbers are right, also in CUDA graphs, after inference mode and in a "
    "step that overflows, and whether the host waits nowhere",
    "fast": "how long ResNet-50's step, a layer, a message and the host take, beside "
    "nn.SyncBatchNorm and nn.BatchNorm; ResNet-50 in a CUDA graph, too",
    "compiled": "the same of compiled code",
    "why": "with which tiles, programs and warps a layer is fastest, and what a layer launches",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    said = "; ".join(f"{name}: {says}" for name, says in SLOTS.items())
    parser.add_argument("--slot", choices=SLOTS, help=said)
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="NAME",
                        help="default: those of the slot, or all")  # fmt: skip
    parser.add_argument("--stand-ins", action="store_true",
                        help="on the CPU, with small sizes: that every part runs")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=560.0,  # less the end of the last part
                        help="parts that begin later fail; default: %(default)g")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY",
                        help="where results go")  # fmt: skip
    arguments = parser.parse_args(argv)
    if missing := list(_missing(arguments.stand_ins)):
        parser.error("missing here: " + "; ".join(missing))
    output: Path = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "stand_ins": arguments.stand_ins,
        "GPU": "" if arguments.stand_ins else str(torch.cuda.get_device_properties(0)),
        "slot": arguments.slot,
        "parts": [],
    }
    end = time.monotonic() + arguments.seconds
    of_slot = [name for name, part in PARTS.items() if part.slot == arguments.slot] or PARTS
    for name in arguments.parts or of_slot:
        part = run(name, end - time.monotonic(), output, stand_ins=arguments.stand_ins)
        results["parts"].append(part)
        (output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {part['says']}", flush=True)
    text = "\n\n".join(_page(results)) + "\n"
    (output / "gpu.md").write_text(text)
    print(text)
    return int(not all(part["passed"] for part in results["parts"]))


def _missing(stand_ins: bool) -> Iterator[str]:
    """A line for each thing, beside packages, that every part needs and that is missing."""
    if stand_ins:
        return
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield "a C compiler, by which Triton makes its launchers"
    if not torch.cuda.is_available():
        yield "a GPU, or a torch that is built with CUDA (--stand-ins needs neither)"


def run(name: str, seconds: float, output: Path, *, stand_ins: bool) -> Row:
    """Run the part for so many seconds at most; returns how it ended, and its rows."""
    rows, start, passed, says = output / f"{name}.jsonl", time.monotonic(), False, ""
    rows.write_text("")
    limit = min(seconds, PARTS[name].seconds * (STRETCH if stand_ins else 1))
    try:
        command, variables = command_of(name, rows, stand_ins), _variables(name, stand_ins)
        ran = _launch.run(command, timeout=max(limit, 0), variables=variables)
        printed, passed = ran.stdout, ran.returncode == 0
    except subprocess.TimeoutExpired as expired:
        printed, says = expired.output, f"no result within {limit:.0f} s"
    (output / f"{name}.txt").write_text(printed)
    says = says or next(iter(printed.strip().splitlines()[::-1]), "").strip("= ")
    if name == "kernels" and " passed" not in says and not stand_ins:  # all were skipped
        passed = False
    return {
        "part": name, "passed": passed, "says": says, "seconds": time.monotonic() - start,
        "failed": re.findall(r"^(?:FAILED|ERROR) .*", printed, re.MULTILINE),
        "rows": [json.loads(line) for line in rows.read_text().splitlines()],
    }  # fmt: skip


def command_of(name: str, rows: Path, stand_ins: bool) -> list[str]:
    """The command of a part, which appends `rows` to their file."""
    if not PARTS[name].tests:
        ranks = max(torch.cuda.device_count(), 1) if PARTS[name].on_all else 1
        arguments = ["-m", "benchmarks.gpu.times", name, str(rows)]
        return _launch.launch_command("torchrun" if ranks > 1 else "", ranks, arguments)
    command = [
        # A library's new warning is no error of a kernel.
        sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", "--noconftest",
        "-o", "filterwarnings=default", "--timeout", "240",
        *(str(ROOT / test) for test in PARTS[name].tests),
    ]  # fmt: skip
    if name == "kernels" and stand_ins:
        command += ["-k", "test_a_message_has_the_weight or test_parts_of_a_message"]
    elif name == "kernels" and importable("xdist"):  # compilation takes most of the time
        command += ["-n", str(min(os.cpu_count() or 1, 12))]
    return command


def _variables(name: str, stand_ins: bool) -> dict[str, str]:
    variables = {
        "PYTHONUNBUFFERED": "1",
        "CHAINER_CUDNN": "0",
        # Containers may have a network that their processes cannot use.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "MULTIBN_GPU_STAND_INS": str(int(stand_ins)),
    }
    if PARTS[name].tests:
        variables["TRITON_INTERPRET"] = str(int(stand_ins))
    if stand_ins:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


def goals(results: Row) -> list[tuple[str, float, float]]:
    """Each goal that there are times for: its name, the value, and the most that it may be."""
    rows = [] if results["stand_ins"] else _times(results)
    steps = [row for row in rows if row["time"] == _LAYER]
    judged: list[tuple[str, float, Any, list[float]]] = [
        ("GPU time / nn.SyncBatchNorm's, geometric mean", 0.8, geometric_mean,
         [_ratio(row) for row in steps]),
        ("GPU time / eight passes at a copy's speed, sizes that fill the GPU, worst", 1.25, max,
         [_ratio(row, "eight passes") for row in steps if row["fills"]]),
        ("host time / nn.SyncBatchNorm's, worst", 1.3, max,
         [_ratio(row) for row in rows if row["time"].startswith("host")]),
        ("ResNet-50's step / with nn.SyncBatchNorm", 0.75, max,
         [_ratio(row) for row in rows if row["time"] == NETWORK]),
        ("ResNet-50's step, compiled or captured / with nn.BatchNorm, worst", 1.1, max,
         [_ratio(row, LOCAL) for row in rows if row["time"].startswith(f"{NETWORK},")]),
    ]  # fmt: skip
    return [(what, float(pick(values)), bound) for what, bound, pick, values in judged if values]


def _times(results: Row) -> list[Row]:
    return [row for part in results["parts"] for row in part["rows"] if "time" in row]


def _ratio(row: Row, other: str = PEER) -> float:
    return float(row["microseconds"][OURS] / row["microseconds"][other])


def _page(results: Row) -> Iterator[str]:
    """The machine, how each part ended, what was judged, and all times."""
    yield "# The GPU path, checked and timed"
    if results["stand_ins"]:
        yield "**Not run on a GPU: every part ran on stand-ins, and the times mean nothing.**"
    versions = [f"{k} {v}" for k, v in results["machine"]["versions"].items() if v]
    yield f"{results['date']}. {', '.join(versions)}. {results['GPU']}"
    if results["slot"]:
        yield f"Slot {results['slot']}: {SLOTS[results['slot']]}."
    yield markdown(("part", "", "s", "says"), [
        (part["part"], "passed" if part["passed"] else "FAILED", f"{part['seconds']:.0f}",
         part["says"][:80].replace("|", "/"))
        for part in results["parts"]
    ])  # fmt: skip
    for part in results["parts"]:
        yield from part["failed"][:10]
    for what, value, bound in goals(results):
        yield f"{what}: {value:.2f}, at most {bound:.2f}: {'met' if value <= bound else 'NOT MET'}"
    names = (OURS, PEER, LOCAL)
    if gpus := max((row.get("gpus", 1) for row in _times(results)), default=0):
        yield f"GPUs that took part: {gpus} in networks, messages and the host's times, else one."
    yield ("A time on the GPU is that of a CUDA graph's replay. A replay leaves out multibn's "
           "looks at messages, and the peer's three waits; times of the host have both, and the "
           "stand-in for a second rank, one launch each way.")  # fmt: skip
    yield markdown(
        ("microseconds", *names, f"/ {PEER}", f"/ {LOCAL}", "/ 8 passes"),
        [(f"{row['time']}: {'x'.join(map(str, row['shape']))} {row['dtype']} {row['layout']}",
          *(f"{row['microseconds'][name]:.1f}" for name in names),
          *(f"{_ratio(row, name):.2f}" for name in names[1:]),
          f"{_ratio(row, 'eight passes'):.2f}" if row["time"] == _LAYER else "")
         for row in _times(results)],
    )  # fmt: skip
    swept = sorted((row["us"], row["setting"]) for part in results["parts"]
                   for row in part["rows"] if "setting" in row)  # fmt: skip
    yield markdown(("microseconds", "setting"), [(f"{us:.1f}", text) for us, text in swept])
