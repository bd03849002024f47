"""Train the same small ResNet in torch, Chainer and JAX, on one process and on two, and compare.

All runs start from the same weights and use the same batches of 8 images. Two ranks hold 4 images
each. With plain batch normalization, each rank normalizes by the statistics of its own 4 images;
with synchronized batch normalization, both ranks normalize by the statistics of all 8 images, as
one process does. In JAX, ranks are devices of one process.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pictures
from digits import BATCH_SIZE, STEPS_PER_EPOCH
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
OUT = EXAMPLES.parent / "out"

# A run reproduces the reference if no loss differs by more (losses are of order 1). After three
# epochs, float32 rounding changes the loss by about 1e-6, statistics of half the batch by about 1.
TOLERANCE = 1e-3

SECONDS_PER_RUN = 300  # a run that takes longer is treated as a deadlock

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    # By default, Open MPI refuses to run as root, the only user in many containers, and to start
    # more ranks than the machine has cores.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass
class Run:
    framework: str
    launcher: str
    script: str
    num_ranks: int
    norm: str
    losses: list[float] = field(default_factory=list)
    accuracy: float = float("nan")
    seconds: float = float("nan")

    @property
    def images(self) -> str:
        return f"{self.num_ranks} x {BATCH_SIZE // self.num_ranks}"

    @property
    def label(self) -> str:
        batch_norm = "synchronized" if self.norm == "sync" else "plain"
        return f"{self.framework}, {self.launcher}, {self.images}, {batch_norm}"

    @property
    def loss(self) -> float:
        """The mean loss of the last epoch, or of the steps so far."""
        return float(np.mean(self.losses[-STEPS_PER_EPOCH:]))

    def command(self, steps: int, dtype: str, output: Path) -> list[str]:
        if self.launcher == "torchrun":
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(self.num_ranks)]
        elif self.launcher == "shard_map":
            launch = ["env", f"JAX_NUM_CPU_DEVICES={self.num_ranks}", "JAX_PLATFORMS=cpu"]
            launch += [sys.executable]
        else:
            # The wheel of Open MPI puts mpiexec next to python.
            path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
            launch = [shutil.which("mpiexec", path=path) or "mpiexec", "-n", str(self.num_ranks)]
            launch += [sys.executable, "-m", "mpi4py"]
        options = ["--norm", self.norm, "--steps", str(steps), "--dtype", dtype]
        return [*launch, str(EXAMPLES / self.script), *options, "--output", str(output)]

    def differences(self, reference: "Run") -> np.ndarray[Any, Any]:
        """Return, for each step, the largest difference of losses up to this step."""
        return np.maximum.accumulate(np.abs(np.subtract(self.losses, reference.losses)))


WAYS = {
    "torch DDP": ("torchrun", "train_torch.py"),
    "torch": ("mpiexec", "train_torch.py"),
    "Chainer": ("mpiexec", "train_chainer.py"),
    "JAX": ("shard_map", "train_flax.py"),
}


def all_runs() -> list[Run]:
    """All runs, the reference first: one process without multibn."""
    alone = [Run(name, *WAYS[name], num_ranks=1, norm="plain") for name in ("torch DDP", "Chainer")]
    return alone + [
        Run(name, *way, num_ranks=2, norm=norm)
        for norm in ("plain", "sync")
        for name, way in WAYS.items()
    ]


class RunError(Exception):
    """A run failed. Arguments: the error message, and the end of the run's output."""


def execute(run: Run, index: int, steps: int, dtype: str, console: Console) -> None:
    stem = f"{index}-{Path(run.script).stem}-{run.num_ranks}-{run.norm}"
    printed, written = OUT / "demo" / f"{stem}.txt", OUT / "demo" / f"{stem}.jsonl"
    printed.parent.mkdir(parents=True, exist_ok=True)
    written.write_text("")  # a line is appended per step
    start = time.monotonic()
    with (
        Progress(
            TextColumn(f"{run.label:<40}"),
            BarColumn(None),  # takes the rest of the line
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]:<11}"),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
        printed.open("w") as file,
        launched(run.command(steps, dtype, written), file) as process,
    ):
        task = progress.add_task("", total=steps, loss="starting")
        for entry in follow(written, process, deadline=start + SECONDS_PER_RUN):
            if "loss" in entry:
                run.losses.append(entry["loss"])
                progress.update(task, advance=1, loss=f"loss {run.loss:.4f}")
            else:
                run.accuracy = entry["accuracy"]
    run.seconds = time.monotonic() - start
    if process.returncode:
        in_time = run.seconds < SECONDS_PER_RUN
        problem = (
            f"exited with {process.returncode}"
            if in_time
            else f"did not end within {SECONDS_PER_RUN} s"
        )
        raise RunError(f"{run.label}: {problem}.", printed.read_text()[-4000:])


@contextmanager
def launched(command: list[str], file: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a launcher in a new session; leaving the block early ends the launcher and its ranks."""
    process = subprocess.Popen(
        command,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        cwd=EXAMPLES.parent,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # Both launchers end their ranks on SIGTERM; the ranks are in other process groups.
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def follow(
    path: Path, process: subprocess.Popen[bytes], deadline: float
) -> Iterator[dict[str, float]]:
    """Yield the JSON lines that the process writes to a file, until the process ends."""
    with path.open() as file:
        unfinished = ""
        while True:
            ended = process.poll() is not None  # checked before reading, so that no line is missed
            *lines, unfinished = (unfinished + file.read()).split("\n")
            yield from map(json.loads, lines)
            if ended or time.monotonic() > deadline:
                return
            time.sleep(0.1)


def results(runs: list[Run]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="loss: mean of the last epoch;\n"
        "difference: the largest over all steps, from the first run (the reference)",
    )
    for header in ("run", "launcher", "ranks x\nimages", "batch norm"):
        table.add_column(header, no_wrap=True)
    for header in ("test\nacc.", "loss", "difference", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    for _, group in itertools.groupby(runs, key=lambda run: (run.num_ranks, run.norm)):
        for run in group:
            difference = run.differences(runs[0])[-1]
            table.add_row(
                run.framework,
                run.launcher,
                run.images,
                "synchronized" if run.norm == "sync" else "plain",
                f"{run.accuracy:.1%}",
                f"{run.loss:.4f}",
                "" if run is runs[0] else f"{difference:.2g}",
                f"{run.seconds:.1f} s",
                style="green" if difference < TOLERANCE else "",
            )
        table.add_section()
    return table


def draw(runs: list[Run]) -> Figure:
    """Draw a curve per run. With the same batch norm, the curves of all frameworks coincide."""
    figure = Figure(figsize=(pictures.WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    # The reference is wide and the synchronized curves have dashes, so that both can be seen.
    looks: dict[tuple[int, str], tuple[str, dict[str, Any]]] = {
        (1, "plain"): ("one process", {"color": pictures.INK, "linewidth": 6, "alpha": 0.3}),
        (2, "plain"): ("two processes, plain", {"color": pictures.PLAIN}),
        (2, "sync"): ("two, synchronized", {"color": pictures.SYNCHRONIZED, "dashes": (3, 2)}),
    }
    width = 25  # steps in a moving average
    for group, members in itertools.groupby(runs, key=lambda run: (run.num_ranks, run.norm)):
        label, look = looks[group]
        for i, run in enumerate(members):
            if group == (1, "plain") and i:
                continue  # overlapping transparent lines would look darker
            smooth = np.convolve(run.losses, np.full(width, 1 / width), mode="valid")
            steps = np.arange(width - 1, len(run.losses))
            axes.plot(steps, smooth, label="" if i else label, **look)
    axes.set(title="Training loss", xlabel="step", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(handlelength=3)
    return figure


def verdict(runs: list[Run]) -> tuple[bool, str]:
    """Return whether exactly the synchronized runs reproduce the reference, and a summary."""
    reference, *others = runs
    parts = [run for run in others if run.num_ranks > 1 and run.norm == "plain"]
    largest = max(run.differences(reference)[-1] for run in others if run not in parts)
    smallest = min(run.differences(reference)[-1] for run in parts)
    holds = bool(largest < TOLERANCE < smallest)
    return holds, (
        f"{len(reference.losses)} steps on two ranks, in torch, Chainer and JAX, compared with one "
        "process on the whole batch:\n"
        f"  synchronized: the same losses, within {largest:.2g}\n"
        f"  plain:        losses differ by {smallest:.2g} or more\n"
        f"{'It holds' if holds else 'It does NOT hold'}: synchronized ranks train like one process."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3 * STEPS_PER_EPOCH, help="default: 3 epochs")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # run `finally` blocks

    console = Console()
    runs = all_runs()
    console.print(
        f"{len(runs)} small trainings, about two minutes. One process with {BATCH_SIZE} "
        f"images is the reference; two processes with {BATCH_SIZE // 2} each should have the same "
        "losses if their batch norms are synchronized.\n",
        highlight=False,
    )
    start = time.monotonic()
    try:
        for index, run in enumerate(runs):
            execute(run, index, args.steps, args.dtype, console)
    except RunError as error:
        message, output = error.args
        console.print(output, markup=False, highlight=False)
        console.print(f"[bold red]{message}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

    console.print(results(runs))
    pictures.save(partial(draw, runs), OUT / "demo")
    holds, sentence = verdict(runs)
    seconds = time.monotonic() - start
    console.print(f"{seconds:.0f} s; curves: {OUT / 'demo.svg'}", highlight=False)
    console.print(sentence, style="bold green" if holds else "bold red", highlight=False)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
