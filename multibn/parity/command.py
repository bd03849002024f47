"""`multibn parity`: plans the launches, runs them, and reports the comparison."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from multibn._environment import find_command, importable
from multibn._launch import LAUNCHERS, WorkerError, Written
from multibn.parity import cases, compare
from multibn.parity.cases import Case
from multibn.parity.compare import Row
from multibn.parity.job import Job
from multibn.parity.surfaces import SURFACES

# The modules that surfaces and communicators need.
NEEDS = {
    "torch": ["torch"],
    "chainer": ["chainer"],
    "single process": [],
    "gloo": ["torch"],
    "mpi": ["mpi4py"],
    "chainermn naive": ["chainer", "mpi4py"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    names = ", ".join(case.name for case in cases.CASES)
    add("--ranks", type=_ranks, metavar="N,...", help="default: 1,2,4")
    add(
        "--cases",
        type=_cases,
        metavar="PATTERN,...",
        help=f"shell-style patterns of names, default all: {names}",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="draw a heat map of the errors")
    add(
        "--model",
        type=_spec,
        metavar="MODULE:FUNCTION",
        help="instead, compare a pair of models of your own, on one process and on two ranks: "
        "FUNCTION() returns a torch model, the Chainer model with the same layers, whose weights "
        "are carried over, and an example input, a NumPy array of 2 or more samples",
    )
    add(
        "--timeout",
        type=_seconds,
        default=120,
        metavar="SECONDS",
        help="end the processes of a launch after this time; default 120",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments; returns the exit status."""
    from multibn.parity import model, report

    for path in (args.json, args.plot):
        if path and (path.is_dir() or not path.parent.is_dir()):
            return _refuse(f"{path} must be a file in a folder that exists. Make the folder first.")
    if args.plot and args.plot.suffix != ".png":
        return _refuse(f"`--plot` must be the name of a file that ends in .png: got {args.plot}.")
    out = report.console(stderr=True)
    say = partial(out.print, soft_wrap=True)
    with out.status("starting") as status:
        if args.model:
            for option in ("ranks", "cases"):
                if getattr(args, option):
                    return _refuse(
                        f"`--{option}` must be left out beside `--model`, which compares a pair of "
                        "models on one process and on two ranks."
                    )
            over = "gloo" if not_run("torch", "mpi") else "mpi"
            absent = not_run("chainer", over)
            rows = [Row("torch, chainer", over, 2, absent)]
            if not absent:
                rows = model.run(args.model, over, timeout=args.timeout, say=say)
        else:
            rows = plan(args.ranks or [1, 2, 4])
            for _, equal_sizes in groupby(rows, key=lambda row: row.size):
                run_and_compare(
                    list(equal_sizes), args.cases or cases.CASES, args.timeout, status.update, say
                )
    report.show(rows)
    if args.json:
        report.write_json(rows, args.json)
    if args.plot:
        report.plot(rows, args.plot)
    return compare.exit_status(rows)


def _refuse(message: str) -> int:
    print(f"multibn parity: {message}", file=sys.stderr)
    return 2


def plan(sizes: Iterable[int]) -> list[Row]:
    """All combinations by number of ranks; `not_run` is set if one cannot be run here."""
    return [
        Row(surface, communicator, size, not_run(surface, communicator))
        for size in sizes
        for surface in SURFACES
        for communicator, launcher in LAUNCHERS.items()
        if size == 1 or launcher
    ]


def not_run(surface: str, communicator: str) -> str:
    """Why the combination cannot be run here; "" if nothing is missing."""
    needs = dict.fromkeys(NEEDS[surface] + NEEDS[communicator])
    absent = [f"{name} is not installed" for name in needs if not importable(name)]
    if LAUNCHERS[communicator] == "mpiexec" and find_command("mpiexec") is None:
        absent.append("no mpiexec on PATH")
    return "; ".join(absent)


def run_and_compare(
    rows: Sequence[Row],
    chosen: Sequence[Case],
    timeout: float,
    update: Callable[[str], object],
    say: Callable[[str], object],
) -> None:
    """Run the combinations `rows`, all with one number of ranks, and fill in their outcomes.

    `update` shows the running launch; `say` prints for good.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if not row.not_run:
            groups.setdefault(LAUNCHERS[row.communicator], []).append(row)
    ran: list[tuple[Row, list[Written]]] = []
    for group in groups.values():
        job = Job(
            group[0].size,
            tuple(dict.fromkeys(row.communicator for row in group)),
            tuple(dict.fromkeys(row.surface for row in group)),
            tuple(case.name for case in chosen),
        )
        update(job.name)
        try:
            written = job.run(timeout=timeout)
        except WorkerError as error:
            say(f"{error.output}\n{error}")
            for row in group:
                row.not_run, row.failed = error.reason, True
            continue
        ran += [(row, written) for row in group]
    for case in chosen if ran else ():
        update(f"comparing {case.name}")
        compare.compare([row for row, _ in ran], [written for _, written in ran], case)


def _ranks(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise argparse.ArgumentTypeError(
            f"must be positive numbers separated by commas: got {text!r}. Try --ranks 1,2."
        )
    return sizes


def _seconds(text: str) -> float:
    try:
        if 0 < float(text) <= 1e9:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"must be a positive number of seconds: got {text!r}. Try --timeout 120."
    )


def _spec(text: str) -> str:
    if all(text.partition(":")):
        return text
    raise argparse.ArgumentTypeError(
        f"must be MODULE:FUNCTION: got {text!r}. Try --model {text.strip(':')}:pair, with a "
        "function `pair` that returns a torch model, a Chainer model and an input."
    )


def _cases(text: str) -> list[Case]:
    try:
        return cases.select(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
