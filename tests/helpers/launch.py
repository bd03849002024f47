"""Starts scripts on several ranks."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multibn.parity import launch as _launch
from tests.harness import forked_python as forked
from tests.helpers import require

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("torchrun", "mpiexec")
# Buffered, so that the lines of two ranks do not mix.
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
# Seconds after which processes hang, however busy the machine is; less than pytest's own limit,
# which ends no process that another thread has started.
HANGS = 240.0

_OF_LAUNCHERS = re.compile("(OMPI|PMIX|PRTE|TORCHELASTIC|WORLD|LOCAL|GROUP)_|RANK")

# What mpiexec now and then says of itself on a busy machine, before it starts any rank.
NOT_STARTED = "listener thread failed to start"


@contextlib.contextmanager
def forked_python() -> Iterator[None]:
    """While the context lasts, launchers start ranks that are forks, see `forked`."""
    with contextlib.ExitStack() as stack:
        if forked.SUPPORTED:
            variables = _launch.environment() | VARIABLES
            # The variable is torchrun's; `launch_command` reads it too.
            os.environ["PYTHON_EXEC"] = stack.enter_context(forked.command(variables))
            stack.callback(os.environ.pop, "PYTHON_EXEC")
        yield


def python() -> str:
    """The command that starts Python: while `forked_python` lasts, a fork."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def captured(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The end of a command of the environment of these tests, and what the command prints."""
    known: dict[str, Any] = {"cwd": ROOT, "env": _launch.environment(), "timeout": HANGS}
    return subprocess.run(command, capture_output=True, text=True, check=False, **known | options)


def printed(
    *arguments: str, interpreter: str = sys.executable, alone: bool = False, **variables: str
) -> str:
    """What one more Python prints; fails with what it says if it ends in an error.

    With `alone`, no launcher has started it, whatever has started this process.
    """
    known = _launch.environment()
    if alone:
        known = {name: value for name, value in known.items() if not _OF_LAUNCHERS.match(name)}
    ran = captured(interpreter, *arguments, env=known | variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def run(
    launcher: str, size: int, *arguments: str, timeout: float = HANGS, real: bool = False
) -> subprocess.CompletedProcess[str]:
    """Start `python *arguments` on `size` ranks and wait; all processes are ended at `timeout`.

    With `real`, no process is a fork.
    """
    require.need(launcher)
    result = _run(launcher, size, arguments, timeout, real)
    if NOT_STARTED in result.stdout:
        return _run(launcher, size, arguments, timeout, real)
    return result


def _run(
    launcher: str, size: int, arguments: Sequence[str], timeout: float, real: bool
) -> subprocess.CompletedProcess[str]:
    command, variables = _launch.launch_command(launcher, size, arguments), VARIABLES
    if real:
        command = [sys.executable if word == python() else word for word in command]
        variables = VARIABLES | {"PYTHON_EXEC": sys.executable}
    try:
        return _launch.run(command, timeout=timeout, variables=variables)
    except subprocess.TimeoutExpired as expired:
        text = f"{expired.output}\n[ended after {timeout} s]"
        return subprocess.CompletedProcess(command, -1, text)
