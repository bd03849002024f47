"""A fork that stands for a process of Python behaves as the process would."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import forked_python
from tests.helpers import launch

NEEDS = "torch"

if not forked_python.SUPPORTED:
    pytest.skip("needs Linux", allow_module_level=True)

CODE = """
import os, sys
print(sys.argv[1:], sys.stdin.read(), os.environ["ASKED"], os.getcwd(), os.getppid())
print("torch" in sys.modules, file=sys.stderr)
"""
VARIABLES = os.environ | launch.VARIABLES | {"ASKED": "yes"}


def _run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=VARIABLES, capture_output=True, text=True, **options)


def test_it_is_a_fork_and_its_arguments_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CODE)
    for words in (["-c", CODE], ["-W", "error", str(script)]):
        ran = _run(launch.python(), *words, "a", "-b", input="text", cwd=tmp_path)
        assert ran.stdout == f"['a', '-b'] text yes {tmp_path} {os.getpid()}\n"
        assert ran.stderr == "True\n"


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "raise SystemExit('a text')",
        "raise SystemExit(3)",
        "import atexit; atexit.register(print, 'at exit'); raise SystemExit",
        "import os; os.abort()",
        "import os; os.kill(os.getpid(), 9)",
        "import threading; threading.Timer(0.1, print, ['in a thread']).start()",
    ],
)
def test_its_end_is_that_of_python(code: str) -> None:
    ran, expected = (_run(python, "-c", code) for python in (launch.python(), sys.executable))
    assert (ran.returncode, ran.stdout) == (expected.returncode, expected.stdout)
    assert ran.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]  # not all of a trace


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_fork_too(number: int) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        [launch.python(), "-c", code], env=VARIABLES, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        fork = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(10) == -number
    assert select.select([fork], [], [], 10)[0]  # it has ended
    os.close(fork)
