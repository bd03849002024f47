"""One check that goes wrong on one rank fails alone, by name, with what the ranks printed."""

import os
import tempfile
import textwrap
from functools import partial
from pathlib import Path

import pytest

from multibn._launch import environment
from tests.harness import checks

pytestmark = pytest.mark.launches

MODULE = """
    import os, signal, sys, time
    import numpy as np
    from multibn import SingleProcess
    from tests.communicators import conformance

    def check_that_passes(world):
        assert world.allreduce(np.ones(1)).item() == world.size

    check_between = check_after = check_last = check_that_passes

    def check_that_asserts(world):
        check_that_passes(world)
        print("before the assertion")
        assert world.rank == 0, "asserted"

    def check_that_compares(world):
        check_that_passes(world)
        members = [world.rank]
        assert members == []

    class Wrong(SingleProcess):
        def allreduce(self, x):
            return x + 1

    def check_that_asserts_in_a_helper(world):
        check_that_passes(world)
        conformance.check_communicator(Wrong())

    def check_that_asserts_too_early(world):
        assert world.rank == 0, "out of step"
        check_that_passes(world)

    def check_that_raises(world):
        if world.rank == 1:
            raise KeyError("raised")
        check_that_passes(world)

    def check_that_kills(world):
        if world.rank == 1:
            print("about to be killed")
            os.kill(os.getpid(), signal.SIGKILL)
        check_that_passes(world)

    def check_that_hangs(world):
        if world.rank == 1:
            os.write(2, b"about to hang")
            time.sleep(1000)
        check_that_passes(world)

    def check_that_exits(world):
        if world.rank == 1:
            sys.exit(3)
"""

DEADLINE = 6.0  # seconds for each of them, on a busy machine
GRACE = 2.0  # seconds for a rank that waits for one that has failed: it waits for ever

# What is said of each check, in the order in which they run.
SAID = {
    "check_that_passes": [],
    "check_that_asserts": ["rank 0: passed", "AssertionError: asserted", "before the assertion"],
    "check_that_compares": [
        "rank 0: Traceback",
        "assert members == []",
        "AssertionError: assert [0] == []",
        "AssertionError: assert [1] == []",
    ],
    "check_that_asserts_in_a_helper": ["assert not ["],
    "check_between": [],
    "check_that_asserts_too_early": ["AssertionError: out of step", "rank 0: no end"],
    "check_that_raises": ["KeyError: 'raised'", "rank 0: no end"],
    "check_that_kills": ["rank 1: no end", "about to be killed"],
    "check_after": [],
    "check_that_hangs": [
        f"not over within {DEADLINE:g} s",
        "rank 1: no end",
        "about to hang",
        "Timeout (",
    ],
    "check_that_exits": ["SystemExit: 3"],
    "check_last": [],
}


# Every kind under the launcher that starts fast, and those that a launcher sees under the other.
CHOSEN = {
    "mpiexec": list(SAID),
    "torchrun": ["check_that_kills", "check_between", "check_that_hangs", "check_last"],
}


def _complaints(launcher: str) -> dict[str, str]:
    """What is said of each of the chosen checks, by name."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "checks_throw_away.py").write_text(textwrap.dedent(MODULE))
        names = {name: f"checks_throw_away:{name}" for name in CHOSEN[launcher]}
        path = f"{environment()['PYTHONPATH']}{os.pathsep}{folder}"
        several = checks.Checks(
            launcher, 2, names.values(), deadline=DEADLINE, grace=GRACE, path=path
        )
        several.run()
        return {name: several.complaint(names[name]) for name in names}


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(name, marks=pytest.mark.beside(partial(_complaints, name), name))
        for name in CHOSEN
    ],
)
def test_a_check_that_goes_wrong_fails_alone(launcher: str, beside: dict[str, str]) -> None:
    assert list(beside) == CHOSEN[launcher]
    for name, complaint in beside.items():
        assert bool(complaint) == bool(SAID[name]), f"{name}: {complaint}"
        for text in SAID[name]:
            assert text in complaint, f"{name}: {complaint}"
