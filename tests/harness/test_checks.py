"""One check that goes wrong on one rank fails alone, by name, with what the ranks printed."""

import os
import tempfile
import textwrap
from pathlib import Path

import pytest

from multibn.parity.launch import environment
from tests.harness import checks

LATE = "MULTIBN_SET_BY_ANOTHER_TEST"  # when the ranks are about to start

MODULE = f"""
    import os, signal, time
    import numpy as np

    def check_that_passes(world):
        assert {LATE!r} not in os.environ
        assert world.allreduce(np.ones(1)).item() == world.size

    check_after = check_last = check_that_passes

    def check_that_asserts(world):
        check_that_passes(world)
        print("before the assertion")
        members = [world.rank]
        assert members == [0]

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
"""

DEADLINE = 6.0  # seconds for each of them, on a busy machine
GRACE = 2.0  # seconds for a rank that waits for one that has failed: it waits for ever

# What is said of each check, in the order in which they run.
SAID = {
    "check_that_passes": [],
    "check_that_asserts": ["rank 0: passed", "AssertionError: assert [1] == [0]", "before the as"],
    "check_that_raises": [
        "not over within 2 s after the error on rank(s) [1]",
        *("KeyError: 'raised'", "rank 0: no end"),
    ],
    "check_that_kills": ["rank 1: no end", "about to be killed"],
    "check_after": [],
    "check_that_hangs": ["not over within 6 s", "rank 1: no end", "about to hang", "Timeout ("],
    "check_last": [],
}


def _complaints() -> dict[str, str]:
    """What is said of each check under the launcher that sees ranks end, by name."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "checks_throw_away.py").write_text(textwrap.dedent(MODULE))
        names = {name: f"checks_throw_away:{name}" for name in SAID}
        path = f"{environment()['PYTHONPATH']}{os.pathsep}{folder}"
        several = checks.Checks(
            "torchrun", 2, names.values(), deadline=DEADLINE, grace=GRACE, path=path
        )
        os.environ[LATE] = "1"
        try:
            several.run()
        finally:
            del os.environ[LATE]
        return {name: several.complaint(names[name]) for name in names}


@pytest.mark.launches
@pytest.mark.beside(_complaints, "torchrun")
def test_a_check_that_goes_wrong_fails_alone(beside: dict[str, str]) -> None:
    for name, complaint in beside.items():
        assert bool(complaint) == bool(SAID[name]), f"{name}: {complaint}"
        for text in SAID[name]:
            assert text in complaint, f"{name}: {complaint}"
