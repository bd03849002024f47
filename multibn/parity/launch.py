"""Launch ranks under torchrun and mpiexec, and collect their results.

Each rank runs `python -m multibn.parity.launch FUNCTION COMMUNICATOR OPTIONS DIRECTORY`.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import multibn
from multibn._platform import find_command
from multibn.communicators import Communicator, SingleProcess, as_communicator

# The launcher of each communicator; "" starts one process without a launcher.
LAUNCHERS = {
    "single process": "",
    "gloo": "torchrun",
    "mpi": "mpiexec",
    "chainermn naive": "mpiexec",
}


def launch_command(launcher: str, size: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts `python *arguments` on `size` ranks."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [python, *torchrun, f"--nproc-per-node={size}", *arguments]
    if launcher == "mpiexec":
        # -m mpi4py: an exception on one rank aborts all ranks.
        mpiexec = [find_command("mpiexec") or "mpiexec", "-n", str(size)]
        return [*mpiexec, python, "-m", "mpi4py", *arguments]
    return [python, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment, adapted to ranks on a small machine."""
    # The user's models may be in the working directory, which a console script does not search.
    path = [os.path.dirname(multibn.__path__[0]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        # By default, Open MPI refuses to run as root, and to start more ranks than cores.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # With more ranks than cores, a waiting rank must yield its core.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    output: int | IO[str] = subprocess.PIPE,
    variables: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher that prints to `output`; terminate launcher and ranks after the block.

    `variables` is the whole environment of the processes, `environment()` by default.
    """
    process = subprocess.Popen(
        command,
        env=environment() if variables is None else variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Terminate a launcher and its ranks."""
    # Both launchers start ranks in other process groups, and terminate them on SIGTERM.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(10)


def run(
    command: Sequence[str], *, timeout: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end; `stdout` of the result is the output of launcher and ranks.

    `variables` are added to `environment()`. After `timeout` seconds, all processes are terminated,
    and TimeoutExpired is raised with their `output`.
    """
    with started(command, variables=environment() | dict(variables or {})) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            end(process)
            expired.output, _ = process.communicate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def enter_world(name: str) -> Communicator:
    """Return a communicator of all ranks; `name` is a key of `LAUNCHERS`. Collective."""
    if name == "gloo":
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return as_communicator(dist.group.WORLD)
    if name == "mpi":
        from mpi4py.MPI import COMM_WORLD

        return as_communicator(COMM_WORLD)
    if name == "chainermn naive":
        from multibn.chainer_backend import compat

        compat.make_importable()
        import chainermn

        return as_communicator(chainermn.create_communicator("naive"))
    return SingleProcess()


def leave_world() -> None:
    """Destroy torch's default process group, if it exists."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


class WorkerError(Exception):
    """Ranks failed: `reason` is the first error, `output` the end of what all ranks printed."""

    def __init__(self, name: str, reason: str, output: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason, self.output = reason, output[-4000:]


def run_workers(
    function: str,
    communicator_name: str,
    size: int,
    /,
    *,
    timeout: float,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run "package.module.function" on each rank, and return the ranks' results by way of JSON.

    Arrays become lists. The function is called with a communicator, whose name is a key of
    `LAUNCHERS`, and with `options`. Raises WorkerError if ranks fail, or after `timeout` seconds.
    """
    name = f"{function} over {communicator_name}, {size} rank(s)"
    with tempfile.TemporaryDirectory(prefix="multibn-") as directory:
        arguments = [function, communicator_name, json.dumps(options), directory]
        worker = ["-m", "multibn.parity.launch", *arguments]
        command = launch_command(LAUNCHERS[communicator_name], size, worker)
        try:
            result = run(command, timeout=timeout, variables=variables)
        except subprocess.TimeoutExpired as expired:
            raise WorkerError(name, f"no result within {timeout:g} s", expired.output) from None
        paths = sorted(Path(directory).iterdir())
        if result.returncode or len(paths) != size:
            # The last line of a traceback: "ZeroDivisionError: ..."
            errors = re.findall(
                r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)$", result.stdout, re.M
            )
            ended = f"exit status {result.returncode}, results of {len(paths)} of {size} ranks"
            raise WorkerError(name, errors[0] if errors else ended, result.stdout)
        return [json.loads(path.read_text()) for path in paths]


def main(path: str, communicator_name: str, options: str, directory: str) -> None:
    """Run the function named `path` on this rank, and write the result to `directory`."""
    module, _, name = path.rpartition(".")
    function = getattr(import_module(module), name)
    communicator = enter_world(communicator_name)
    result = json.dumps(function(communicator, **json.loads(options)), default=lambda a: a.tolist())
    Path(directory, f"{communicator.rank:03}.json").write_text(result)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
