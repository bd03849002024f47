"""`multibn parity`: plans the launches, runs them, and reports the comparison."""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from multibn._environment import find_command, importable
from multibn._launch import LAUNCHERS, WorkerError, Written, run_workers
from multibn.parity import cases, compare, oracle
from multibn.parity.cases import Case
from multibn.parity.compare import Row
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
# Bounds of models, wider than those of single layers: rounding errors grow with depth.
OF_MODELS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    names = ", ".join(case.name for case in cases.CASES)
    add("--ranks", type=_ranks, metavar="N,...", help="default: 1,2,4")
    add(
        "--cases",
        type=cases.select,
        metavar="PATTERN,...",
        help=f"shell-style patterns of names, default all: {names}",
    )
    add("--json", type=_file, metavar="FILE", help="write all numbers to FILE")
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
    from multibn.parity import report

    for option in ("ranks", "cases"):
        if args.model and getattr(args, option):
            args.parser.error(
                f"`--{option}` must be left out beside `--model`, which compares a pair of models "
                "on one process and on two ranks."
            )
    out = report.console(stderr=True)
    say = partial(out.print, soft_wrap=True)
    with out.status("starting") as status:
        if args.model:
            rows = run_models(args.model, args.timeout, say)
        else:
            rows = plan(args.ranks or [1, 2, 4])
            run_layers(rows, args.cases or cases.CASES, args.timeout, status.update, say)
    report.show(rows)
    if args.json:
        report.write_json(rows, args.json)
        say(f"wrote {args.json}")
    return compare.exit_status(rows)


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


def launch(
    size: int,
    communicators: Sequence[str],
    *,
    timeout: float,
    surfaces: Sequence[str] = (),
    cases: Sequence[str] = (),
    model: str = "",
) -> list[Written]:
    """The results of `size` ranks that train each surface over each communicator, or a model.

    All communicators have one launcher. Raises WorkerError after `timeout` seconds, or if workers
    fail.
    """
    job = {"communicators": communicators, "surfaces": surfaces, "cases": cases, "model": model}
    name = f"{', '.join(surfaces)}{model} over {', '.join(communicators)}, ranks: {size}"
    worker = ["-m", "multibn.parity.worker", json.dumps(job)]
    return run_workers(name, LAUNCHERS[communicators[0]], size, worker, timeout=timeout)


def run_layers(
    rows: Sequence[Row],
    chosen: Sequence[Case],
    timeout: float,
    update: Callable[[str], object],
    say: Callable[[str], object],
) -> None:
    """Run the combinations `rows` that can be run, and add their errors.

    `update` shows the running launch; `say` prints for good.
    """
    launches: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if not row.not_run:
            launches.setdefault((row.size, LAUNCHERS[row.communicator]), []).append(row)
    start = time.monotonic()
    for number, ((size, launcher), group) in enumerate(launches.items(), 1):
        under = f"{launcher}, {size} rank{'s' * (size > 1)}" if launcher else "one process"
        seconds = time.monotonic() - start
        update(f"launch {number} of {len(launches)}, after {seconds:.0f} s: {under}")
        communicators = list(dict.fromkeys(row.communicator for row in group))
        surfaces = list(dict.fromkeys(row.surface for row in group))
        names = [case.name for case in chosen]
        try:
            written = launch(size, communicators, timeout=timeout, surfaces=surfaces, cases=names)
        except WorkerError as error:
            _fail(group, error, say)
            continue
        for case in chosen:
            for row in group:
                compare.compare(row, written, case)


def run_models(spec: str, timeout: float, say: Callable[[str], object]) -> list[Row]:
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
            written = launch(size, [name], timeout=timeout, model=spec)
        except WorkerError as error:
            _fail([both], error, say)
            return rows
        _compare_models(both, "each other", written, "torch", written, "chainer")
        for framework in ("torch", "chainer") if alone else ():
            rows.append(Row(framework, name, size))
            _compare_models(rows[-1], "one process", written, framework, alone, framework)
        for note in () if alone else written[0].notes["notes"]:
            say(note)
        alone = written
    return rows


def _fail(rows: Sequence[Row], error: WorkerError, say: Callable[[str], object]) -> None:
    say(f"{error.output}\n{error}")
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
    with suppress(ValueError):
        if 0 < float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"must be a positive number of seconds: got {text!r}. Try --timeout 120."
    )


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists: got {text!r}. Make the folder first."
        )
    return path


def _spec(text: str) -> str:
    if all(text.partition(":")):
        return text
    raise argparse.ArgumentTypeError(
        f"must be MODULE:FUNCTION: got {text!r}. Try --model {text.strip(':')}:pair, with a "
        "function `pair` that returns a torch model, a Chainer model and an input."
    )
