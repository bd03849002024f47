"""The parts, each in processes of its own: what ends or hangs one part leaves the others.

`python -m benchmarks.gpu.parts PART DIRECTORY` is one rank of a part.
"""

import importlib
import os
import sys
import time
from typing import Any, NamedTuple

from multibn._environment import find_command, importable
from multibn._launch import WorkerError, run_workers, write

Row = dict[str, Any]
STAND_INS = "MULTIBN_GPU_STAND_INS"  # "1" in the processes of `--stand-ins`


class Part(NamedTuple):
    """A generator of rows; the seconds that it may take; its launcher, "" for one rank.

    `ranks` is 0 for as many as there are GPUs. Without what the part `needs`, a module or a
    command, the part is reported as missing.
    """

    rows: str
    seconds: float
    launcher: str = ""
    ranks: int = 1
    needs: tuple[str, ...] = ()


PARTS = {
    "device": Part("checks.device", 60),
    "numbers": Part("checks.numbers", 120),
    "graphs": Part("checks.graphs", 60),
    "host waits": Part("checks.host_waits", 60),
    "modes": Part("checks.modes", 90),
    "nccl": Part("checks.nccl", 60, "torchrun", 0),
    "kernels": Part("checks.kernel_checks", 180),
    "gloo": Part("checks.gloo", 60, "torchrun", 2),
    "mpi": Part("checks.mpi", 60, "mpiexec", 2, ("mpi4py", "mpiexec")),
    "resnet": Part("times.network", 90),
    "layers": Part("times.layers", 150),
    "host": Part("times.host", 60),
    "compiled": Part("checks.compiled", 120),
    "compiled layers": Part("times.compiled_layers", 150),
    "profile": Part("times.profile", 60),
    "sweep": Part("times.sweep", 400),
}


class Slot(NamedTuple):
    """Parts for ten minutes, the most valuable first, and what they say together."""

    says: str
    parts: tuple[str, ...]


SLOTS = {
    "right": Slot("whether the numbers are right, also in CUDA graphs, after inference mode and in "
                  "a step that overflows, and whether the host waits nowhere",
                  ("device", "numbers", "graphs", "host waits", "modes", "nccl", "kernels", "gloo",
                   "mpi")),
    "fast": Slot("how long ResNet-50's step, a layer and the host take, beside nn.SyncBatchNorm, "
                 "nn.BatchNorm and compiled layers",
                 ("device", "resnet", "layers", "host", "compiled", "compiled layers")),
    "why": Slot("with which tiles, programs and warps a layer is fastest, and what one layer "
                "called 20 times launches", ("device", "profile", "sweep")),
}  # fmt: skip


def run(name: str, seconds: float, *, stand_ins: bool, num_gpus: int) -> Row:
    """Run the part for so many seconds at most; returns its rows, and how it ended.

    `status` is "passed", "failed" or "missing"; what has not passed has a `reason`, and what has
    failed the end of its `output`, which has the rows from before.
    """
    part = PARTS[name]
    if missing := [n for n in part.needs if not (importable(n) or find_command(n))]:
        return {"part": name, "status": "missing", "reason": ", ".join(missing), "rows": []}
    if seconds <= 0:
        return {"part": name, "status": "failed", "reason": "no time was left", "rows": []}
    start = time.perf_counter()
    size = part.ranks or num_gpus
    rows, output = [], ""
    try:
        written = run_workers(
            name, part.launcher if size > 1 else "", size, ["-m", __spec__.name, name],
            # A machine that runs tests is busy, and a hang there is another test's business.
            timeout=min(seconds, part.seconds * (3 if stand_ins else 1)),
            variables=_variables(name, stand_ins),
        )  # fmt: skip
        rows = [row for rank in written for row in rank.notes["rows"]]
        wrong = [row for row in rows if not row.get("ok", True)]
        reason = f"{len(wrong)} check(s), first: {wrong[0]['check']}" if wrong else ""
        if not rows:
            reason = "no rank wrote a row"
    except WorkerError as error:
        reason, output = error.reason, error.output
    record = {"part": name, "status": "failed" if reason else "passed", "reason": reason}
    return record | {"seconds": time.perf_counter() - start, "output": output, "rows": rows}


def _variables(name: str, stand_ins: bool) -> dict[str, str]:
    variables = {
        "PYTHONUNBUFFERED": "1",
        "CHAINER_CUDNN": "0",
        # Containers may have a network that their processes cannot use.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        STAND_INS: str(int(stand_ins)),
    }
    if stand_ins:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if stand_ins and name == "numbers":
        variables["TRITON_INTERPRET"] = "1"
    return variables


def main(name: str, directory: str) -> None:
    module, _, function = PARTS[name].rows.partition(".")
    rows = []
    for row in getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)():
        print(row, flush=True)
        rows.append(row)
    write(directory, os.getpid(), {}, {"rows": rows})


if __name__ == "__main__":
    main(*sys.argv[1:])
