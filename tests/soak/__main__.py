"""Trains for ten minutes in many ways, and counts what the ranks hold.

Writes the tables of docs/soak.md. The exit status is 1 if anything grew on a rank.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import worker
from multibn import _launch
from tests.helpers import launch
from tests.soak import report
from tests.soak.deeds import Row

# How ranks exchange messages: the communicator, and variables.
TRANSPORTS = {
    "shared memory": ("gloo", {}),
    "gloo": ("gloo", {"MULTIBN_SHARED_MEMORY": "0"}),
    "MPI": ("mpi", {}),
}
# Each transport's share of the time, by ranks.
_SHARES = {2: 0.08, 4: 0.04, 8: 0.03, 16: 0.02, 32: 0.02}
_DEADLINE = 600.0  # seconds beyond a run's share


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=32, help="the most ranks")
    parser.add_argument("--page", type=Path, default=Path("docs/soak.md"), help="has the tables")
    arguments = parser.parse_args()
    began = time.monotonic()
    runs: dict[tuple[str, int], Any] = {}
    failed = False
    with launch.forked_python():  # ranks that find torch imported
        for ranks, share in _SHARES.items():
            for transport in TRANSPORTS if ranks <= arguments.ranks else ():
                results = _run(transport, ranks, arguments.seconds * share)
                if results is None:
                    failed = True
                    continue
                runs[transport, ranks] = results
                for row in results["rows"]:
                    print(" | ".join(report.cells(transport, ranks, row)), flush=True)
                    for growth in row.growth:
                        failed = True
                        print(f"GROWN: {transport}, {ranks} ranks, {growth}", flush=True)
    if not failed:
        figures = _figures(32) if arguments.ranks >= 32 else {}
        report.write(arguments.page, runs, figures, time.monotonic() - began)
    return int(failed)


def _run(transport: str, ranks: int, seconds: float) -> dict[str, Any] | None:
    over, variables = TRANSPORTS[transport]
    try:
        first, *_ = worker.run(
            "tests.soak.worker.measure", over, ranks, seconds=seconds,
            timeout=seconds + _DEADLINE, variables=launch.VARIABLES | variables,
        )  # fmt: skip
    except _launch.WorkerError as error:
        print(f"{error}\n{error.output}", flush=True)
        return None
    return first.notes | {"rows": [Row(*row) for row in first.notes["rows"]]}


def _figures(ranks: int) -> Any:
    """What `tests.soak.figures` prints, from processes that import torch themselves."""
    command = _launch.launch_command("mpiexec", ranks, ["-m", "tests.soak.figures"])
    began = time.time()
    variables = launch.VARIABLES | {"SOAK_BEGAN": str(began)}
    ran = _launch.run(command, timeout=_DEADLINE, variables=variables)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("figures ")]
    assert lines, ran.stdout
    figures = json.loads(lines[0].removeprefix("figures "))
    return figures | {"the launcher has ended": [time.time() - began, None]}


if __name__ == "__main__":
    sys.exit(main())
