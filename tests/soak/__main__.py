"""Trains for ten minutes in many ways, and counts what the ranks hold.

Writes the tables of docs/soak.md. The exit status is 1 if anything grew on a rank.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import worker
from multibn._launch import WorkerError
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
        report.write(arguments.page, runs, time.monotonic() - began)
    return int(failed)


def _run(transport: str, ranks: int, seconds: float) -> dict[str, Any] | None:
    over, variables = TRANSPORTS[transport]
    try:
        first, *_ = worker.run(
            "tests.soak.worker.measure", over, ranks, seconds=seconds,
            timeout=seconds + _DEADLINE, variables=launch.VARIABLES | variables,
        )  # fmt: skip
    except WorkerError as error:
        print(f"{error}\n{error.output}", flush=True)
        return None
    return first.notes | {"rows": [Row(*row) for row in first.notes["rows"]]}


if __name__ == "__main__":
    sys.exit(main())
