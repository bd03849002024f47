"""`multibn parity`: plans the launches, runs them, and reports the comparison."""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import multibn
from multibn._environment import find_command, importable
from multibn._launch import LAUNCHERS, WorkerError, Written, run_workers
from multibn.parity import cases, compare, oracle
from multibn.parity.cases import Case
from multibn.parity.compare import Error, Row
from multibn.parity.worker import SURFACES

# The modules that surfaces and communicators need.
NEEDS = {
    "torch": ["torch"],
    "chainer": ["chainer"],
    "single process": [],
    "gloo": ["torch"],
    "mpi": ["mpi4py"],
    "chainermn naive": ["chainer", "mpi4py"],
}
# Bounds of models, wider than those of single layers: rounding errors grow with depth.
OF_MODELS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    names = ", ".join(case.name for case in cases.CASES)
    text = f"shell-style patterns of names, default all: {names}"
    add("--ranks", type=_ranks, metavar="N,...", help="default: 1,2,4")
    add("--cases", type=cases.select, metavar="PATTERN,...", help=text)
    add("--json", type=_file, metavar="FILE", help="write all numbers to FILE")
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="instead, compare a pair of models of your own, on one process and on two ranks: "
        "FUNCTION() returns a torch model, the Chainer model with the same layers, whose weights "
        "are carried over, and an example input, a NumPy array of 2 or more samples",
    )
    text = "end the processes of a launch after this time; default 120"
    add("--timeout", type=float, default=120, metavar="SECONDS", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments; returns the exit status."""
    if args.model and (args.ranks or args.cases):
        args.parser.error(
            "`--ranks` and `--cases` must be left out beside `--model`, which compares a pair of "
            "models on one process and on two ranks."
        )
    if args.model:
        rows = run_models(args.model, args.timeout)
    else:
        rows = plan(args.ranks or [1, 2, 4])
        run_layers(rows, args.cases or cases.CASES, args.timeout)
    show(rows)
    if args.json:
        write_json(rows, args.json)
        _say(f"wrote {args.json}")
    return compare.exit_status(rows)


def plan(sizes: Iterable[int]) -> list[Row]:
    """All combinations; `not_run` is set if one cannot be run here."""
    return [
        Row(surface, communicator, size, not_run(surface, communicator))
        for surface in SURFACES
        for communicator, launcher in LAUNCHERS.items()
        for size in sizes
        if size == 1 or launcher
    ]


def not_run(surface: str, communicator: str) -> str:
    """Why the combination cannot be run here; "" if nothing is missing."""
    needs = dict.fromkeys(NEEDS[surface] + NEEDS[communicator])
    absent = [f"{name} is not installed" for name in needs if not importable(name)]
    if LAUNCHERS[communicator] == "mpiexec" and find_command("mpiexec") is None:
        absent.append("no mpiexec on PATH")
    return "; ".join(absent)


def launch(
    size: int, communicators: Sequence[str], timeout: float, **job: str | Sequence[str]
) -> list[Written]:
    """The results of `size` ranks that do `job` over each communicator, as worker.py describes.

    All communicators have one launcher. Raises WorkerError after `timeout` seconds, or if workers
    fail.
    """
    name = f"{', '.join(communicators)}, ranks: {size}"
    worker = ["-m", "multibn.parity.worker", json.dumps(job | {"communicators": communicators})]
    return run_workers(name, LAUNCHERS[communicators[0]], size, worker, timeout=timeout)


def run_layers(rows: Sequence[Row], chosen: Sequence[Case], timeout: float) -> None:
    """Run the combinations `rows` that can be run, and add their errors."""
    launches: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if not row.not_run:
            launches.setdefault((row.size, LAUNCHERS[row.communicator]), []).append(row)
    start = time.monotonic()
    for number, ((size, launcher), group) in enumerate(launches.items(), 1):
        under = f"{launcher}, {size} rank{'s' * (size > 1)}" if launcher else "one process"
        seconds = time.monotonic() - start
        _say(f"launch {number} of {len(launches)}, after {seconds:.0f} s: {under}")
        communicators = list(dict.fromkeys(row.communicator for row in group))
        surfaces = list(dict.fromkeys(row.surface for row in group))
        names = [case.name for case in chosen]
        try:
            written = launch(size, communicators, timeout, surfaces=surfaces, cases=names)
        except WorkerError as error:
            _fail(group, error)
            continue
        for case in chosen:
            for row in group:
                compare.compare(row, written, case)


def run_models(spec: str, timeout: float) -> list[Row]:
    """Run a user's models on one process and on two ranks.

    Returns rows for the frameworks against each other, and for two ranks against one process. A
    pair that one process refuses is not launched again.
    """
    over = "gloo" if not_run("torch", "mpi") else "mpi"
    if absent := not_run("chainer", over):
        return [Row("torch, chainer", over, 2, absent)]
    rows: list[Row] = []
    alone: list[Written] = []
    for name, size in (("single process", 1), (over, 2)):
        both = Row("torch, chainer", name, size)
        rows.append(both)
        try:
            written = launch(size, [name], timeout, model=spec)
        except WorkerError as error:
            _fail([both], error)
            return rows
        _compare_models(both, "each other", written, "torch", written, "chainer")
        for framework in ("torch", "chainer") if alone else ():
            rows.append(Row(framework, name, size))
            _compare_models(rows[-1], "one process", written, framework, alone, framework)
        for note in () if alone else written[0].notes["notes"]:
            _say(note)
        alone = written
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(rows: Sequence[Row], error: WorkerError) -> None:
    _say(f"{error.output}\n{error}")
    for row in rows:
        row.not_run, row.failed = error.reason, True


def _compare_models(
    row: Row, case: str, ranks: Sequence[Written], one: str, others: Sequence[Written], other: str
) -> None:
    for name in ("y", "dx", "eval"):
        got, expected = (
            np.concatenate([rank.arrays[f"{framework}/{name}"] for rank in written])
            for written, framework in ((ranks, one), (others, other))
        )
        bound = OF_MODELS[expected.dtype.name][name]
        row.add(case, name, oracle.relative_error(got, expected), bound)


def show(rows: Sequence[Row]) -> None:
    """Print a table, which fits 80 columns but for reasons, and the `summary`."""
    print("communicator      ranks  error  quantity, case: the worst for its bound")
    surface = ""
    for row in rows:
        if row.surface != surface:
            surface = row.surface
            print(surface)
        place = f"  {row.communicator:15} {row.size:5}"
        if row.not_run:
            print(f"{place}  {row.verdict}: {row.not_run}")
            continue
        worst = row.worst
        where = f"{worst.quantity}, {worst.case}"
        print(f"{place}  {worst.error:5.0e}  {where:36}  {row.verdict}")
        broken = {e.case: e for e in sorted(row.errors) if e.ratio > 1}  # the worst of each case
        for e in broken.values():
            print(f"    {e.case}: {e.error:.0e} in {e.quantity}, bound {e.bound:.0e}")
    print(summary(rows))


def summary(rows: Sequence[Row]) -> str:
    """A sentence about all rows."""
    ran = [row for row in rows if row.errors]
    cases = max((len({error.case for error in row.errors}) for row in ran), default=0)
    verdicts = [row.verdict for row in rows]
    return (
        f"{verdicts.count('ok')} of {len(ran)} combinations are within bounds, in {cases} case(s) "
        f"each; {verdicts.count('failed')} failed; {verdicts.count('not run')} could not be run "
        "here."
    )


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write everything to `path`; NaN and infinite errors become null."""

    def finite(error: Error) -> dict[str, Any]:
        return {k: None if v == math.inf else v for k, v in error._asdict().items()}

    document = {
        "multibn": multibn.__version__,
        "exit_status": compare.exit_status(rows),
        "summary": summary(rows),
        "rows": [
            vars(row) | {"verdict": row.verdict, "errors": list(map(finite, row.errors))}
            for row in rows
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _ranks(text: str) -> list[int]:
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(
            f"must be positive numbers separated by commas: got {text!r}. Try --ranks 1,2."
        )
    return sorted(set(map(int, text.split(","))))


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists: got {text!r}. Make the folder first."
        )
    return path
