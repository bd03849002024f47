"""`multibn parity`: launches ranks, and reports the comparison."""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multibn import __version__
from multibn._environment import find_command, importable
from multibn._launch import LAUNCHERS, WorkerError, run_workers
from multibn.parity.cases import CASES, select
from multibn.parity.worker import SURFACES, Error

# The modules that surfaces and communicators need.
NEEDS = {
    "torch": ["torch"],
    "chainer": ["chainer"],
    "models": ["torch", "chainer"],
    "single process": [],
    "gloo": ["torch"],
    "mpi": ["mpi4py"],
    "chainermn naive": ["chainer", "mpi4py"],
}
TIMEOUT = 600.0  # seconds for a launch


@dataclass
class Row:
    """A combination of a communicator, a number of ranks and a surface, with its outcome."""

    communicator: str
    size: int
    surface: str
    verdict: str = "not run"  # or "ok", "BROKEN", "failed"
    reason: str = ""  # why there are no errors
    errors: list[Error] = field(default_factory=list)  # of every rank

    def __str__(self) -> str:
        """A line, which fits 80 columns but for reasons, and a line for each broken case."""
        place = f"{self.communicator} x{self.size}"
        line = f"{place:19} {self.surface:7}"
        if not self.errors:
            return f"{line} {self.verdict}: {self.reason}"
        worst = max(self.errors)
        where = f"{worst.quantity}, {worst.case}"
        broken = {e.case: e for e in sorted(self.errors) if e.ratio > 1}  # the worst of each case
        return "\n".join(
            [f"{line} {worst.error:5.0e} {where:36} {self.verdict}"]
            + [f"    {e.case}: {e.error:.0e} in {e.quantity}, bound {e.bound:.0e}"
               for e in broken.values()]
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--ranks", nargs="+", type=int, metavar="N", help="default: 1 2 4, and 2 for models"
    )
    names = ", ".join(case.name for case in CASES)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--cases",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help=f"shell-style patterns of names, default all: {names}",
    )
    what.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="instead, compare a pair of models of your own in one process and on ranks: "
        "FUNCTION() returns a torch model, a Chainer model with the same layers, names and eps, "
        "whose weights are carried over, and an example input, a NumPy array of 2 or more samples. "
        "It returns the same on every call. The models return an array with an entry for each "
        "sample, and draw no random numbers",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")


def run(args: argparse.Namespace) -> int:
    """Compare both frameworks, over every communicator, with exact results.

    Their layers train on real processes beside a float64 oracle. Exit status: 0
    all within bounds, 1 a bound is broken, 2 it could not be run.

    multibn parity
    multibn parity --ranks 1 2 --cases float32 'uneven*' --json errors.json
    multibn parity --model mymodels:pair
    """
    sizes = sorted(set(args.ranks or ([2] if args.model else [1, 2, 4])))
    if sizes[0] < 1:
        raise ValueError(f"--ranks must be positive: got {sizes[0]}.")
    names = [case.name for case in select(args.cases)]
    if args.json:
        args.json.touch()
    print("over, ranks         surface error quantity, case: the worst for its bound", flush=True)
    surfaces, options = (
        (["models"], {"model": args.model}) if args.model else (SURFACES, {"cases": names})
    )
    launches = [
        (over, size)
        for over in (("gloo",) if args.model else LAUNCHERS)
        for size in sizes
        if size == 1 or LAUNCHERS[over]
    ]
    rows: list[Row] = []
    start = time.monotonic()
    for number, (over, size) in enumerate(launches, 1):
        after = f"after {time.monotonic() - start:.0f} s"
        print(f"launch {number} of {len(launches)}, {after}", file=sys.stderr, flush=True)
        rows += launch(over, size, surfaces, **options)
    verdicts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if args.json:
        write_json(rows, args.json)
        print(f"wrote {args.json}", file=sys.stderr)
    return exit_status(rows)


def launch(over: str, size: int, surfaces: Iterable[str], **options: Any) -> list[Row]:
    """The rows of one launch, printed: `worker.measure` of the surfaces that can run here."""
    rows = [Row(over, size, surface, reason=missing(surface, over)) for surface in surfaces]
    able = [row for row in rows if not row.reason]
    ranks: list[Any] = []
    try:
        if able:
            options["surfaces"] = [row.surface for row in able]
            function = "multibn.parity.worker.measure"
            ranks = run_workers(function, over, size, timeout=TIMEOUT, **options)
    except WorkerError as error:
        print(f"{error.output}\n{error}", file=sys.stderr, flush=True)
        for row in able:
            row.verdict, row.reason = "failed", error.reason
    for row in rows:
        every = (Error(*error) for rank in ranks for error in rank)
        row.errors = [error for error in every if error.surface == row.surface]
        if row.errors:
            row.verdict = "BROKEN" if max(row.errors).ratio > 1 else "ok"
        print(row, flush=True)
    return rows


def missing(surface: str, over: str) -> str:
    """Why the combination cannot be run here; "" if nothing is missing."""
    needs = dict.fromkeys(NEEDS[surface] + NEEDS[over])
    absent = [f"{name} is not installed" for name in needs if not importable(name)]
    if LAUNCHERS[over] == "mpiexec" and find_command("mpiexec") is None:
        absent.append("no mpiexec on PATH")
    return "; ".join(absent)


def exit_status(rows: Sequence[Row]) -> int:
    """0 for success, 1 if a bound is broken, 2 if ranks failed or nothing was run."""
    verdicts = {row.verdict for row in rows}
    return 1 if "BROKEN" in verdicts else 2 if "failed" in verdicts or "ok" not in verdicts else 0


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write everything to `path`; NaN and infinite errors become null."""

    def finite(error: Error) -> dict[str, Any]:
        return {k: None if v == math.inf else v for k, v in error._asdict().items()}

    document = {
        "multibn": __version__,
        "exit_status": exit_status(rows),
        "rows": [vars(row) | {"errors": list(map(finite, row.errors))} for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
