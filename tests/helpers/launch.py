"""Runs a module's checks on several processes, once for each launcher and number of ranks.

A check is a function `check_*(world)` of a module in tests/distributed; it is given the
communicator of all processes. A module's checks run in one launch, one after the other, and every
check is a test of its own: `test_*` functions look up what became of it in `outcomes`.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from multibn.parity.launch import environment, launch_command
from tests.helpers import require

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("torchrun", "mpiexec")


# What mpiexec now and then says of itself on a busy machine, before it starts any rank.
_NOT_STARTED = "listener thread failed to start"


def run(
    launcher: str, size: int, *arguments: str, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Start `python *arguments` on `size` ranks and wait; all processes are killed at `timeout`."""
    require.need(launcher)
    result = _run(launcher, size, arguments, timeout)
    return _run(launcher, size, arguments, timeout) if _NOT_STARTED in result.stdout else result


def _run(
    launcher: str, size: int, arguments: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        launch_command(launcher, size, arguments),
        cwd=ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        output += f"\n[killed after {timeout} s]"
    finally:
        _kill(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@functools.cache
def outcomes(launcher: str, size: int, module: str) -> dict[str, list[str]]:
    """What each check of `module` said on each rank; an empty string is success."""
    with tempfile.TemporaryDirectory() as directory:
        worker = ["tests/distributed/worker.py", launcher, module, directory]
        result = run(launcher, size, *worker)
        said = [json.loads(p.read_text()) for p in sorted(Path(directory).glob("*.json"))]
    if len(said) != size or result.returncode != 0:
        raise AssertionError(f"{' '.join(result.args)}\nexit {result.returncode}\n{result.stdout}")
    return {check: [rank[check] for rank in said] for check in said[0]}


def expect_success(launcher: str, size: int, module: str, check: str) -> None:
    """Fail with what the ranks said unless all of them passed `check`."""
    require.need(launcher)
    said = outcomes(launcher, size, module)[check]
    assert not any(said), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said))


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
