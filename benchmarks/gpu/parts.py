"""The parts, and the processes that run them: what ends or hangs one part leaves the others."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.names import STAND_INS
from multibn import _launch
from multibn._environment import find_command, importable
from multibn._launch import launch_command

Row = dict[str, Any]
_OUTPUT = 4000  # characters that are kept of what a failed part printed


@dataclass(frozen=True)
class Part:
    """A generator of rows, "module.function"; its launch; and the seconds that it may take.

    `ranks` is 0 for as many as there are GPUs. Without what the part `needs`, a module or a
    command, the part is reported as missing. `stand_in` says what takes the GPU's place with
    stand-ins.
    """

    rows: str
    seconds: float
    stand_in: str
    launcher: str = ""
    ranks: int = 1
    needs: Sequence[str] = ()
    interpreted: bool = False  # with stand-ins, by Triton


_HOST = "tensors in host memory"

# The most valuable first: time may run out.
PARTS = {
    "device": Part("checks.device", 60, _HOST),
    "numbers": Part("checks.numbers", 120, "Triton's interpreter", interpreted=True),
    "kernels": Part("checks.kernel_checks", 180, "Triton's interpreter, two of the tests"),
    "nccl": Part("checks.nccl", 60, "gloo for NCCL", ranks=0),
    "host waits": Part("checks.host_waits", 60, _HOST),
    "graphs": Part("checks.graphs", 60, "a call for a replay"),
    "layers": Part("times.layers", 150, "gloo, nn.BatchNorm for nn.SyncBatchNorm"),
    "host": Part("times.host", 60, "gloo, nn.BatchNorm for nn.SyncBatchNorm"),
    "gloo": Part("checks.gloo", 60, _HOST, "torchrun", 2),
    "mpi": Part("checks.mpi", 60, _HOST, "mpiexec", 2, ("mpi4py", "mpiexec")),
    "compiled": Part("checks.compiled", 120, "no compiler after torch's tracing"),
    "resnet": Part("times.network", 90, "gloo, nn.BatchNorm for nn.SyncBatchNorm"),
}


def run(name: str, seconds: float, *, stand_ins: bool, num_gpus: int = 1) -> Row:
    """Run the part for so many seconds at most; returns its rows, and how it ended.

    `status` is "passed", "failed", "timed out" or "missing". A failed part has a `reason`, and the
    end of its `output`; its rows are those from before.
    """
    part = PARTS[name]
    missing = [n for n in part.needs if not (importable(n) or find_command(n))]
    if missing:
        return {"part": name, "status": "missing", "reason": ", ".join(missing), "rows": []}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="multibn-") as directory:
        worker = ["-m", "benchmarks.gpu.worker", name, directory]
        size = part.ranks or num_gpus
        # One rank needs no launcher.
        launcher = "torchrun" if part.ranks == 0 and size > 1 else part.launcher
        command = launch_command(launcher, size, worker)
        if stand_ins and part.interpreted:
            # Triton reads at its import whether to interpret: not as a fork that has imported it.
            command[0] = sys.executable
        status, reason, output = "passed", "", ""
        try:
            variables = _variables(stand_ins)
            # A machine that runs tests is busy, and a hang there is another test's business.
            limit = part.seconds * (3 if stand_ins else 1)
            ran = _launch.run(command, timeout=min(seconds, limit), variables=variables)
        except subprocess.TimeoutExpired as expired:
            status, output = "timed out", expired.output or ""
            reason = f"no end within {expired.timeout:.0f} s"
        else:
            if ran.returncode:
                status, output = "failed", ran.stdout
                reason = _launch.WorkerError(f"exit status {ran.returncode}", output).reason
        rows = [
            json.loads(line)
            for path in sorted(Path(directory).glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        num_files = len(list(Path(directory).glob("*.jsonl")))
    if status == "passed":
        wrong = [row for row in rows if not row.get("ok", True)]
        if wrong:
            status, reason = "failed", f"{len(wrong)} check(s), first: {wrong[0]['check']}"
        elif num_files != size or not rows:
            status, reason = "failed", f"{num_files} of {size} rank(s) wrote {len(rows)} row(s)"
        if status == "failed":
            output = ran.stdout
    record = {"part": name, "status": status, "seconds": time.perf_counter() - start}
    if stand_ins:
        record["stand-in"] = part.stand_in
    if status != "passed":
        record |= {"reason": reason, "output": output[-_OUTPUT:]}
    return record | {"rows": rows}


def _variables(stand_ins: bool) -> dict[str, str]:
    variables = {
        "PYTHONUNBUFFERED": "1",
        "CHAINER_CUDNN": "0",
        # Containers may have a network that their processes cannot use.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "TRITON_INTERPRET": "0",
        STAND_INS: "0",
    }
    if stand_ins:
        variables |= {"TRITON_INTERPRET": "1", STAND_INS: "1", "CUDA_VISIBLE_DEVICES": ""}
    return variables
