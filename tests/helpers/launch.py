"""Starts scripts on several ranks."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from multibn import _launch
from tests.helpers import require

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("torchrun", "mpiexec")
# Buffered, so that the lines of two ranks do not mix.
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}

# What mpiexec now and then says of itself on a busy machine, before it starts any rank.
NOT_STARTED = "listener thread failed to start"


def run(
    launcher: str, size: int, *arguments: str, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Start `python *arguments` on `size` ranks and wait; all processes are ended at `timeout`."""
    require.need(launcher)
    result = _run(launcher, size, arguments, timeout)
    return _run(launcher, size, arguments, timeout) if NOT_STARTED in result.stdout else result


def _run(
    launcher: str, size: int, arguments: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    command = _launch.launch_command(launcher, size, arguments)
    try:
        return _launch.run(command, timeout=timeout, variables=VARIABLES)
    except subprocess.TimeoutExpired as expired:
        text = f"{expired.output}\n[ended after {timeout} s]"
        return subprocess.CompletedProcess(command, -1, text)
