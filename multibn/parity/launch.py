"""Starts workers under torchrun and mpiexec, with a time limit, and collects what they wrote."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import multibn
from multibn._environment import find_command
from multibn.parity.cases import NDArrayAny

# The launcher of each communicator; "" is none.
LAUNCHERS = {
    "single process": "",
    "gloo": "torchrun",
    "mpi": "mpiexec",
    "chainermn naive": "mpiexec",
}


def launch_command(launcher: str, size: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts `python *arguments` on `size` ranks."""
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [sys.executable, *torchrun, f"--nproc-per-node={size}", *arguments]
    if launcher == "mpiexec":
        # -m mpi4py: an exception on one rank ends them all.
        mpiexec = [find_command("mpiexec") or "mpiexec", "-n", str(size)]
        return [*mpiexec, sys.executable, "-m", "mpi4py", *arguments]
    return [sys.executable, *arguments]


@dataclass(frozen=True)
class Job:
    """What one launch of workers runs.

    Attributes
    ----------
    launcher
        `"torchrun"`, `"mpiexec"`, or `""` for a process of its own.
    size
        Number of ranks.
    communicators, surfaces
        Each surface is trained over each communicator.
    cases
        Names of cases.
    model
        `module:function` of a user's pair of models, which takes the place of surfaces and cases.
    risky
        Whether workers that fail are a result.
    """

    launcher: str
    size: int
    communicators: tuple[str, ...]
    surfaces: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    model: str = ""
    risky: bool = False

    @property
    def name(self) -> str:
        """For people."""
        ranks = f"{self.size} rank{'s' * (self.size > 1)}"
        return f"{self.launcher or 'no launcher'}, {ranks}: {', '.join(self.surfaces)}{self.model}"

    @property
    def spec(self) -> str:
        """For the worker."""
        return json.dumps(
            {
                "communicators": self.communicators,
                "surfaces": self.surfaces,
                "cases": self.cases,
                "model": self.model,
            }
        )

    def command(self, directory: Path) -> list[str]:
        """The command that runs it and has every rank write to `directory`."""
        worker = ["-m", "multibn.parity.worker", self.spec, str(directory)]
        return launch_command(self.launcher, self.size, worker)


@dataclass
class Written:
    """What one rank wrote: arrays by "surface/communicator/case/step/quantity", and notes."""

    arrays: Mapping[str, NDArrayAny]
    notes: dict[str, Any] = field(default_factory=dict)


class WorkerError(Exception):
    """Workers that failed.

    Attributes
    ----------
    output
        The end of what they printed.
    reason
        The first error in it, as far as can be told, in one line.
    """

    def __init__(self, message: str, output: str, reason: str = "") -> None:
        super().__init__(message)
        self.output = output[-4000:]
        # The last line of a traceback: "ZeroDivisionError: ..."
        errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)$", output, re.M)
        self.reason = reason or (errors[0] if errors else message)


def environment() -> dict[str, str]:
    """That of the workers: this process's own, and what the launchers need on a small machine."""
    # The user's models may be in the working directory, which a console script does not search.
    path = [str(Path(multibn.__file__).parents[1]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        # Open MPI refuses root, and more ranks than cores, unless told otherwise.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # More ranks than cores: a rank that waits must let the others run.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def run(job: Job, directory: Path, *, timeout: float) -> list[Written]:
    """Run `job` and return what each rank wrote to `directory`, which must be empty.

    Raises
    ------
    WorkerError
        If the workers took more than `timeout` seconds, which ends them, or failed.
    """
    with _launched(job.command(directory)) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            output, _ = process.communicate()
            raise WorkerError(
                f"{job.name}: no result within {timeout:g} s. Pass a larger --timeout, or fewer "
                "--cases, if the machine is slow.",
                output,
                f"no result within {timeout:g} s",
            ) from None
    written = sorted(directory.glob("*.json"))
    if process.returncode or len(written) != job.size:
        raise WorkerError(
            f"{job.name}: exit status {process.returncode}, and {len(written)} of {job.size} ranks "
            "wrote their results. What they printed says why.",
            output,
        )
    return [Written(np.load(p.with_suffix(".npz")), json.loads(p.read_text())) for p in written]


@contextlib.contextmanager
def _launched(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, ended with its ranks however the block is left."""
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        # Both launchers put their ranks into other process groups and end them on SIGTERM.
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
