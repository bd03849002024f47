"""`multibn parity`: launch ranks and print the results of the comparison."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from multibn._platform import find_command, importable
from multibn.communicators import SingleProcess
from multibn.parity.cases import CASES, select
from multibn.parity.launch import LAUNCHERS, WorkerError, run_workers
from multibn.parity.pair import load_pair
from multibn.parity.worker import ADAPTERS, Error

# The modules that each adapter and each communicator needs.
NEEDS = {
    "torch": ["torch"],
    "chainer": ["chainer"],
    "flax": ["flax", "jax"],
    "gloo": ["torch"],
    "mpi": ["mpi4py"],
    "chainermn naive": ["chainer", "mpi4py"],
}
TIMEOUT = 600.0  # seconds that a launch may take
MOST_RANKS = 1024  # in a launch: more processes would exhaust the machine without an error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to `parser`."""
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
        help=f"shell-style patterns of the names of cases; default all: {names}",
    )
    what.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="instead, compare two models of your own in one process and on ranks: FUNCTION() must "
        "return two of a torch model, a Chainer model and a flax model, in this order, and an "
        "example input for both, a NumPy array of 3 or more samples. The models must have the same "
        "layers, names and options; the second model's weights are copied to the first. FUNCTION "
        "must return the same on every call. The models must return an array whose first axis is "
        "the batch, and use no random numbers. A flax model runs in one process only; a model of "
        "flax.linen is called with train=True or train=False",
    )


def run(args: argparse.Namespace) -> int:
    """Compare each framework's layers with exact results, over every communicator.

    Layers of torch and Chainer train on real processes, those of flax on devices
    of one process; the results are compared with a float64 oracle. --model
    compares two models instead, their options first. Exit status: 0 all errors
    are within their bounds, 1 a bound is exceeded or an option differs, 2 the
    comparison failed to run.

    multibn parity
    multibn parity --ranks 1 2 --cases float32 'uneven*'
    multibn parity --model mymodels:pair
    """
    sizes = sorted(set(args.ranks or ([2] if args.model else [1, 2, 4])))
    most, limit = MOST_RANKS, ""
    if args.model and not missing("models", "gloo"):
        sys.path.insert(0, os.getcwd())  # ranks find it there, too
        _, _, x, _ = load_pair(args.model, SingleProcess())
        # Many functions of Chainer refuse an empty batch.
        most, limit = len(x), f", the samples of the example input of {args.model}"
    if outside := [size for size in sizes if not 1 <= size <= most]:
        raise ValueError(f"--ranks must be from 1 to {most}{limit}: got {outside[0]}.")
    options: dict[str, Any] = {"cases": [case.name for case in select(args.cases)]}
    communicators, adapters = [*LAUNCHERS], [*ADAPTERS]
    if args.model:
        options, communicators, adapters = {"path": args.model}, ["gloo"], ["models"]
    print("Each row shows the largest error relative to its bound.")
    print(f"{'over x ranks':19} layers  error {'of quantity, in case':36} verdict", flush=True)
    launches = [(c, n, adapters) for c in communicators for n in sizes if n == 1 or LAUNCHERS[c]]
    if not args.model:
        launches.append(("shard_map", sizes[-1], ["flax"]))
    verdicts = [verdict for arguments in launches for verdict in launch(*arguments, **options)]
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).items()))
    return exit_status(verdicts)


def launch(over: str, size: int, adapters: Iterable[str], **options: Any) -> list[str]:
    """Launch ranks, print a row for each adapter, and return the verdicts of the adapters."""
    reasons = {adapter: missing(adapter, over) for adapter in adapters}
    results = {adapter: ("not run", f"not run: {reason}") for adapter, reason in reasons.items()}
    runnable = [adapter for adapter, reason in reasons.items() if not reason]
    try:
        if runnable:
            run_all = partial(run_workers, timeout=TIMEOUT, **options)
            if runnable == ["models"]:
                ranks = run_all("multibn.parity.pair.compare_models", over, size)
            elif runnable == ["flax"]:  # devices of one process
                ranks = run_all("multibn.parity.devices.measure", "single process", 1, size=size)
            else:
                ranks = run_all("multibn.parity.worker.measure", over, size, adapters=runnable)
            errors = [Error(*error) for rank in ranks for error in rank]
            results |= {name: judge([e for e in errors if e.adapter == name]) for name in runnable}
    except WorkerError as error:
        print(f"{error.output}\n{error}", file=sys.stderr, flush=True)
        results |= dict.fromkeys(runnable, ("failed", f"failed: {error.reason}"))
    for adapter, (_, text) in results.items():
        print(f"{f'{over} x{size}':19} {adapter:7} {text}", flush=True)
    return [verdict for verdict, _ in results.values()]


def judge(errors: Sequence[Error]) -> tuple[str, str]:
    """Return "ok" or "BROKEN", and the text to print: one more line for each broken case."""
    worst = max(errors)
    verdict = "BROKEN" if worst.ratio > 1 else "ok"
    error = "-" if worst.text else f"{worst.error:.0e}"  # an option that differs has no error
    lines = [f"{error:>5} {f'{worst.quantity}, {worst.case}':36} {verdict}"]
    # The worst error of each case; each option that differs, once for all ranks.
    broken = {(e.case, e.text): e for e in sorted(errors) if e.ratio > 1}
    for e in broken.values():
        numbers = f"{e.error:.0e} in {e.quantity}, bound {e.bound:.0e}"
        where = f"; the first layer whose output differs is {e.layer}" if e.layer else ""
        lines.append(f"    {e.case}: {e.text or numbers}{where}")
    return verdict, "\n".join(lines)


def missing(adapter: str, over: str) -> str:
    """Return the reasons why this combination cannot run here; "" if it can."""
    needs = dict.fromkeys(NEEDS.get(adapter, []) + NEEDS.get(over, []))
    reasons = [f"{name} is not installed" for name in needs if not importable(name)]
    if LAUNCHERS.get(over) == "mpiexec" and find_command("mpiexec") is None:
        reasons.append("no mpiexec on PATH")
    return "; ".join(reasons)


def exit_status(verdicts: Iterable[str]) -> int:
    """Return 0 for success, 1 if a bound is exceeded, 2 if a launch failed or nothing ran."""
    verdicts = set(verdicts)
    return 1 if "BROKEN" in verdicts else 2 if "failed" in verdicts or "ok" not in verdicts else 0
