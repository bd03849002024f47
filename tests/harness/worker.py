"""One rank: runs checks one after the other, and writes down how each of them ends.

python -m tests.harness.worker LAUNCHER DIRECTORY, see tests/harness/checks.py
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

from _pytest.assertion import install_importhook
from _pytest.config import get_config

from multibn.communicators import Communicator
from multibn.parity.launch import enter_world, leave_world
from tests.harness.checks import End, Ranks
from tests.helpers.launch import ROOT


def main(launcher: str, directory: str) -> None:
    warnings.simplefilter("error")
    _show_sides()
    world = enter_world({"torchrun": "gloo", "mpiexec": "mpi"}[launcher])
    names, deadline = json.loads(Path(directory, "spec").read_text())
    ranks = Ranks(Path(directory), world.size)
    printed = os.open(ranks.printed(world.rank), os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(printed, stream)
    ranks.progress[world.rank] = 0
    for number, name in enumerate(names):
        _meet(ranks, number)
        os.ftruncate(printed, 0)
        faulthandler.dump_traceback_later(max(deadline - 1, 1))  # says where a rank hangs
        end = _run(name, world)
        faulthandler.cancel_dump_traceback_later()
        if end.error:
            end = end._replace(error=end.error + ranks.printed(world.rank).read_text())
        ranks.note(world.rank, end)
        if end.in_step:
            ranks.progress[world.rank] = number + 1
    _meet(ranks, len(names))
    leave_world()


def _show_sides() -> None:
    """A failed `assert` of checks and helpers says both sides, as those of tests do in pytest."""
    hook = install_importhook(get_config())
    hook.fnpats = ["checks_*.py", str(ROOT / "tests" / "*")]


def _meet(ranks: Ranks, number: int) -> None:
    """Wait until all ranks have so many checks behind them; those out of step are ended here."""
    while ranks.progress.min() < number:
        time.sleep(0.0005)


def _run(name: str, world: Communicator) -> End:
    module, _, check = name.partition(":")
    try:
        with warnings.catch_warnings():
            getattr(importlib.import_module(module), check)(world)
    except AssertionError:
        # Checks assert when their collectives are done.
        return End(traceback.format_exc(), in_step=True)
    except BaseException:
        return End(traceback.format_exc(), in_step=False)
    finally:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()  # no check sees what an earlier one has compiled
    return End("", in_step=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
