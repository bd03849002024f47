"""`multibn parity`: plans the launches, runs them, and reports the comparison."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from multibn._environment import ask, find_command, importable
from multibn._launch import LAUNCHERS, WorkerError, Written
from multibn.parity import cases, compare
from multibn.parity.cases import Case
from multibn.parity.compare import Outcome, Row
from multibn.parity.job import Job
from multibn.parity.peers import PEERS

# The communicators of each of multibn's surfaces.
OURS = dict.fromkeys(("torch", "chainer"), tuple(LAUNCHERS))
# What surfaces and communicators need: modules, commands, a GPU.
NEEDS = {
    "torch": ["torch"],
    "chainer": ["chainer"],
    "single process": [],
    "gloo": ["torch"],
    "mpi": ["mpi4py", "mpiexec"],
    "chainermn naive": ["chainer", "mpi4py", "mpiexec"],
    **{name: peer.needs for name, peer in PEERS.items()},
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
        "--peers",
        action="store_true",
        help="also show ChainerMN's link, nn.BatchNorm and, on GPUs, nn.SyncBatchNorm; they never "
        "change the exit status",
    )
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
    if args.model:
        for option in ("ranks", "cases", "peers"):
            if getattr(args, option):
                return _refuse(
                    f"`--{option}` must be left out beside `--model`, which compares a pair of "
                    "models on one process and on two ranks."
                )
        absent = missing()
        if not absent.keys() & {"torch", "chainer"} and (
            complaint := model.complaint(args.model, args.timeout)
        ):
            return _refuse(complaint)
        rows = _run_model(args, absent)
    else:
        chosen = args.cases or cases.CASES
        rows = plan(args.ranks or [1, 2, 4], peers=args.peers)
        with report.progress() as say:
            for _, equal_sizes in groupby(rows, key=lambda row: row.size):
                run_and_compare(list(equal_sizes), chosen, args.timeout, say)
    report.show(rows)
    if args.json:
        report.write_json(rows, args.json)
    if args.plot:
        from multibn.parity import plot

        plot.write(rows, args.plot)
    return compare.exit_status(rows)


def _refuse(message: str) -> int:
    print(f"multibn parity: {message}", file=sys.stderr)
    return 2


def _run_model(args: argparse.Namespace, absent: dict[str, str]) -> list[Row]:
    from multibn.parity import model, report

    needed = [absent[name] for name in ("torch", "chainer") if name in absent]
    if needed:
        return [Row("torch, chainer", "single process", 1, not_run="; ".join(needed))]
    over = "gloo" if {"mpi4py", "mpiexec"} & set(absent) else "mpi"
    with report.progress() as say:
        say(f"running {args.model}")
        rows, notes = model.run(args.model, over, timeout=args.timeout)
        for note in notes:
            say(f"{note}\n")
    return rows


def plan(sizes: Iterable[int], *, peers: bool) -> list[Row]:
    """All combinations by number of ranks; `not_run` is set if one cannot be run here."""
    absent = missing(gpu=peers)
    theirs = {name: (peer.communicator,) for name, peer in PEERS.items()}
    return [
        Row(surface, communicator, size, peer, not_run=_reason(surface, communicator, absent))
        for size in sizes
        for peer, surfaces in ((False, OURS), (True, theirs if peers else {}))
        for surface, communicators in surfaces.items()
        for communicator in communicators
        if size == 1 or LAUNCHERS[communicator]
    ]


def missing(*, gpu: bool = False) -> dict[str, str]:
    """The needs that this machine lacks, with a sentence each; looks for a GPU only if `gpu`."""
    absent = {
        name: f"{name} is not installed"
        for name in ("torch", "chainer", "mpi4py")
        if not importable(name)
    }
    if find_command("mpiexec") is None:
        absent["mpiexec"] = "no mpiexec on PATH"
    if gpu and "torch" not in absent:
        code = "import torch; print(str(torch.cuda.is_available()).lower())"
        if ask(code) is not True:
            absent["GPU"] = "no GPU"
    return absent


def run_and_compare(
    rows: Sequence[Row], chosen: Sequence[Case], timeout: float, say: Callable[[str], None]
) -> None:
    """Run the combinations `rows`, all with one number of ranks, and fill in their outcomes."""
    results: dict[tuple[int, str], list[Written]] = {}
    for job, job_rows in _jobs(rows, chosen):
        say(job.name)
        try:
            written = job.run(timeout=timeout)
        except WorkerError as error:
            _note_failure(job, job_rows, error, say)
            continue
        results |= {(id(row), case): written for row in job_rows for case in job.cases}
        for row in job_rows:
            compare.time_steps(row, written)
    for case in chosen:
        say(f"comparing {case.name}")
        ran = [row for row in rows if (id(row), case.name) in results]
        by_row = [results[id(row), case.name] for row in ran]
        compare.compare(ran, by_row, case)
    for row in rows:
        row.outcomes = {c.name: row.outcomes[c.name] for c in chosen if c.name in row.outcomes}


def _jobs(rows: Sequence[Row], chosen: Sequence[Case]) -> list[tuple[Job, list[Row]]]:
    """Launches for all rows that can run.

    Peers have launches of their own, and separate ones for cases that may crash them, so that a
    crash of their ranks loses no other result.
    """
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in rows:
        if not row.not_run:
            groups.setdefault((row.peer, LAUNCHERS[row.communicator]), []).append(row)
    jobs = []
    for (peer, launcher), group in groups.items():
        communicators = tuple(dict.fromkeys(row.communicator for row in group))
        surfaces = tuple(dict.fromkeys(row.surface for row in group))
        size = group[0].size
        # No peer here weights by samples.
        able = [case for case in chosen if not (peer and case.weighting == "sample")]
        risky = [case.name for case in able if peer and case.split == "empty" and size > 1]
        usual = [case.name for case in able if case.name not in risky]
        for names in filter(None, (usual, risky)):
            job = Job(launcher, size, communicators, surfaces, tuple(names), risky=names is risky)
            jobs.append((job, group))
    return jobs


def _note_failure(
    job: Job, rows: Sequence[Row], error: WorkerError, say: Callable[[str], None]
) -> None:
    if job.risky:
        for row in rows:
            for name in job.cases:
                row.outcomes[name] = Outcome({"y": 1.0}, {"y": math.inf}, crash=error.reason)
        return
    say(f"{error.output}\n{error}")
    for row in rows:
        row.not_run, row.failed = error.reason, True


def _reason(surface: str, communicator: str, absent: dict[str, str]) -> str:
    needs = dict.fromkeys(NEEDS[surface] + NEEDS[communicator])
    return "; ".join(absent[name] for name in needs if name in absent)


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
