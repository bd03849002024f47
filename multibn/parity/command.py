"""`multibn parity`: launches ranks, and reports the comparison."""

import argparse
import os
import sys
import time
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

# The modules that adapters and communicators need.
NEEDS = {
    "torch": ["torch"],
    "chainer": ["chainer"],
    "flax": ["flax", "jax"],
    "gloo": ["torch"],
    "mpi": ["mpi4py"],
    "chainermn naive": ["chainer", "mpi4py"],
}
TIMEOUT = 600.0  # seconds for a launch
MOST_RANKS = 1024  # of a launch: more processes would exhaust a machine before an error


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
        "FUNCTION() returns two of a torch model, a Chainer model and a model of flax.nnx, in this "
        "order, and an example input for both, a NumPy array of 3 or more samples. The models have "
        "the same layers, names and options; the second's weights are carried over. FUNCTION "
        "returns the same on every call. The models return an array with an entry for each "
        "sample, and draw no random numbers. A flax model runs in one process only",
    )


def run(args: argparse.Namespace) -> int:
    """Compare all frameworks, over every communicator, with exact results.

    Layers train on real processes, flax's on devices of one process, and are
    compared with a float64 oracle. With --model, a pair of models is compared,
    its options first. Exit status: 0 all within bounds, 1 a bound is exceeded or
    an option differs, 2 the comparison failed to run.

    multibn parity
    multibn parity --ranks 1 2 --cases float32 'uneven*'
    multibn parity --model mymodels:pair
    """
    sizes = sorted(set(args.ranks or ([2] if args.model else [1, 2, 4])))
    if outside := [size for size in sizes if not 1 <= size <= MOST_RANKS]:
        raise ValueError(f"--ranks must be from 1 to {MOST_RANKS}: got {outside[0]}.")
    if args.model and not missing("models", "gloo"):
        sys.path.insert(0, os.getcwd())  # as `environment` of ranks
        _, _, x, _ = load_pair(args.model, SingleProcess())
        if sizes[-1] > len(x):  # many functions of Chainer refuse an empty batch
            raise ValueError(
                f"--ranks must be {len(x)} or less, the samples of the example input of "
                f"{args.model}: got {sizes[-1]}."
            )
    options: dict[str, Any] = {"cases": [case.name for case in select(args.cases)]}
    overs, adapters = [*LAUNCHERS], [*ADAPTERS]
    if args.model:
        options, overs, adapters = {"path": args.model}, ["gloo"], ["models"]
    print("Each row shows the largest error relative to its bound.")
    print(f"{'over x ranks':19} layers  error {'of quantity, in case':36} verdict", flush=True)
    launches = [(v, n, adapters) for v in overs for n in sizes if n == 1 or LAUNCHERS[v]]
    if not args.model:
        launches.append(("shard_map", sizes[-1], ["flax"]))
    verdicts: list[str] = []
    start = time.monotonic()
    for number, of in enumerate(launches, 1):
        seconds = time.monotonic() - start
        said = f"launch {number} of {len(launches)}, after {seconds:.0f} s"
        print(said, file=sys.stderr, flush=True)
        verdicts += launch(*of, **options)
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).items()))
    return exit_status(verdicts)


def launch(over: str, size: int, adapters: Iterable[str], **options: Any) -> list[str]:
    """The verdicts of one launch, printed: the errors of the adapters that can run here."""
    absent = {adapter: missing(adapter, over) for adapter in adapters}
    found = {adapter: ("not run", f"not run: {reason}") for adapter, reason in absent.items()}
    able = [adapter for adapter, reason in absent.items() if not reason]
    try:
        if able:
            work = partial(run_workers, timeout=TIMEOUT, **options)
            if able == ["models"]:
                ranks = work("multibn.parity.pair.compare_models", over, size)
            elif able == ["flax"]:  # devices of one process
                ranks = work("multibn.parity.devices.measure", "single process", 1, size=size)
            else:
                ranks = work("multibn.parity.worker.measure", over, size, adapters=able)
            errors = [Error(*error) for rank in ranks for error in rank]
            found |= {name: judge([e for e in errors if e.adapter == name]) for name in able}
    except WorkerError as error:
        print(f"{error.output}\n{error}", file=sys.stderr, flush=True)
        found |= dict.fromkeys(able, ("failed", f"failed: {error.reason}"))
    for adapter, (_, text) in found.items():
        print(f"{f'{over} x{size}':19} {adapter:7} {text}", flush=True)
    return [verdict for verdict, _ in found.values()]


def judge(errors: Sequence[Error]) -> tuple[str, str]:
    """The verdict, "ok" or "BROKEN", and its line with one for each broken case."""
    worst = max(errors)
    verdict = "BROKEN" if worst.ratio > 1 else "ok"
    error = "-" if worst.text else f"{worst.error:.0e}"  # of an option
    lines = [f"{error:>5} {f'{worst.quantity}, {worst.case}':36} {verdict}"]
    # The worst of each case, and once for all ranks each option that differs.
    broken = {(e.case, e.text): e for e in sorted(errors) if e.ratio > 1}
    for e in broken.values():
        numbers = f"{e.error:.0e} in {e.quantity}, bound {e.bound:.0e}"
        where = f"; the first layer whose output differs is {e.layer}" if e.layer else ""
        lines.append(f"    {e.case}: {e.text or numbers}{where}")
    return verdict, "\n".join(lines)


def missing(adapter: str, over: str) -> str:
    """Why the combination cannot be run here; "" if nothing is missing."""
    needs = dict.fromkeys(NEEDS.get(adapter, []) + NEEDS.get(over, []))
    absent = [f"{name} is not installed" for name in needs if not importable(name)]
    if LAUNCHERS.get(over) == "mpiexec" and find_command("mpiexec") is None:
        absent.append("no mpiexec on PATH")
    return "; ".join(absent)


def exit_status(verdicts: Iterable[str]) -> int:
    """0 for success, 1 if a bound is broken, 2 if ranks failed or nothing was run."""
    verdicts = set(verdicts)
    return 1 if "BROKEN" in verdicts else 2 if "failed" in verdicts or "ok" not in verdicts else 0
