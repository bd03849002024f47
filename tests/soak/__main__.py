"""Trains for a quarter of an hour in many ways, and counts what the ranks hold.

Writes the tables of tests/soak/README.md. The exit status is 1 if anything grew on a rank.
"""

import argparse
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import worker
from benchmarks.tables import markdown, put
from multibn.parity import launch as _launch
from tests.helpers import launch
from tests.soak.deeds import Row
from tests.soak.held import COLUMNS

# How ranks exchange messages: the communicator, and variables.
TRANSPORTS = {
    "shared memory": ("gloo", {}),
    "gloo": ("gloo", {"MULTIBN_SHARED_MEMORY": "0"}),
    "MPI": ("mpi", {}),
}
# Each transport's share of the time, by ranks.
_SHARES = {2: 0.08, 4: 0.04, 8: 0.03, 16: 0.02, 32: 0.02}
_DEADLINE = 600.0  # seconds beyond a run's share

_DEEDS = ("transport", "ranks", "deed", "turns", *COLUMNS)
_WIDTHS = ("transport", "ranks", "alone", "1", "40", "200", "threads", "MPI communicators")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=32, help="the most ranks")
    page = Path(__file__).with_name("README.md")
    parser.add_argument("--page", type=Path, default=page, help="has the tables")
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
                    print(" | ".join(_cells(transport, ranks, row)), flush=True)
                    for growth in row.growth:
                        failed = True
                        print(f"GROWN: {transport}, {ranks} ranks, {growth}", flush=True)
    if not failed:
        _write(arguments.page, runs, time.monotonic() - began)
    return int(failed)


def _run(transport: str, ranks: int, seconds: float) -> dict[str, Any] | None:
    over, variables = TRANSPORTS[transport]
    try:
        (_, notes), *_ = worker.run(
            "tests.soak.worker.measure", over, ranks, seconds=seconds,
            timeout=seconds + _DEADLINE, variables=launch.VARIABLES | variables,
        )  # fmt: skip
    except _launch.WorkerError as error:
        print(f"{error}\n{error.output}", flush=True)
        return None
    return notes | {"rows": [Row(*row) for row in notes["rows"]]}


def _cells(transport: str, ranks: int, row: Row) -> list[str]:
    """A deed's line of the table."""
    held = [
        f"{b:.1f} → {a:.1f}" if name == "MB" else f"{b:.0f} → {a:.0f}"
        for name, b, a in zip(COLUMNS, row.before, row.after, strict=True)
    ]
    return [*map(str, (transport, ranks, row.deed, row.turns)), *held]


def _write(page: Path, runs: Mapping[tuple[str, int], Any], seconds: float) -> None:
    """Put the tables into the page; `runs` by transport and number of ranks."""
    deeds = [_cells(*key, row) for key, results in runs.items() for row in results["rows"]]
    run = f"Python {platform.python_version()}, {seconds:.0f} s in all:"
    put(page, "deeds", f"{run}\n\n{markdown(_DEEDS, deeds)}")
    put(page, "widths", markdown(_WIDTHS, _widths(runs)))


def _widths(runs: Mapping[tuple[str, int], Any]) -> Iterable[list[str]]:
    for (transport, ranks), results in runs.items():
        if "widths" not in results:
            continue
        held = results["widths"]
        columns = [[held[when][i] for when in ("alone", "1", "40", "200")] for i in range(3)]
        descriptors, threads, duplicates = columns
        if transport == "gloo" and descriptors[-1] - descriptors[0] > ranks - 1:
            raise AssertionError(f"{ranks} ranks: more than one connection each: {descriptors}")
        cells = (transport, ranks, *descriptors)
        yield [*map(str, cells), *(f"{c[0]} / {c[-1]}" for c in (threads, duplicates))]


if __name__ == "__main__":
    sys.exit(main())
