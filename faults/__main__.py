"""Inject the faults of distributed training, and report what the user sees.

Starts real processes under real launchers. Writes faults.json and faults/README.md. The exit status
is 1 if the outcome of a fault is not the expected one.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from faults import machines, report
from faults.launch import Job
from faults.outcome import Outcome
from faults.scenarios import SCENARIOS, Scenario
from faults.setups import OURS, PEERS, SETUPS, Setup

ROOT = Path(__file__).parents[1]
_MAX_CONCURRENT_JOBS = 3  # jobs wait more than they compute


def _jobs(setup: Setup, chosen: Sequence[Scenario]) -> list[Job]:
    """Split the scenarios of a setup into launches; one that ends or blocks ranks runs alone."""
    tried = [s for s in chosen if s.runs_under(setup)]
    together = [s for s in tried if not (s.ends_in(setup) or s.waits_in(setup))]
    # Two launches for a peer, which may hang: the remaining scenarios then need another launch.
    half = (len(together) + 1) // 2 if setup.is_peer else len(together)
    parts = [together[:half], together[half:], *([s] for s in tried if s not in together)]
    return [Job(setup, part) for part in parts if part]


def _outcomes(setups: Iterable[str], chosen: Sequence[Scenario]) -> Iterator[Outcome]:
    jobs = [job for name in setups for job in _jobs(SETUPS[name], chosen)]
    with ThreadPoolExecutor(_MAX_CONCURRENT_JOBS) as pool:
        for outcomes in pool.map(lambda job: list(job.run()), jobs):
            yield from outcomes


# Functions that yield the outcomes of the chosen scenarios: in multibn's setups, with the layers of
# other libraries, and across two network namespaces.
PARTS: dict[str, Callable[[Sequence[Scenario]], Iterator[Outcome]]] = {
    "multibn": partial(_outcomes, OURS),
    "peers": partial(_outcomes, PEERS),
    "two machines": machines.outcomes,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    for name, known in (("parts", PARTS), ("faults", SCENARIOS)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=known, default=[*known], metavar="NAME",
            help="default: all; the rows of the others stay as in faults.json",
        )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIRECTORY",
                        help="default: faults/results, and faults/README.md")  # fmt: skip
    arguments = parser.parse_args(argv)
    output = arguments.output or ROOT / "faults/results"
    output.mkdir(parents=True, exist_ok=True)
    path = output / "faults.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results = {name: earlier[name] for name in PARTS if name in earlier}
    results["machine"] = machine.describe()
    complaints = []
    for name in arguments.parts:
        start = time.monotonic()
        kept = SCENARIOS.keys() - arguments.faults
        rows = [row for row in results.get(name, []) if row["scenario"] in kept]
        results[name] = rows
        for row in map(report.row, PARTS[name]([SCENARIOS[fault] for fault in arguments.faults])):
            report.show(row)
            rows.append(row)
            complaints += [row["complaint"]] * bool(row["complaint"])
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "faults/README.md"
    if arguments.output:
        page = Path(shutil.copy(page, arguments.output))
    report.write(results, page)
    print(f"{len(complaints)} outcomes are not as expected")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
