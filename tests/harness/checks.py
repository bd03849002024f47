"""Runs checks on several ranks: each launcher and number of ranks is started once for all checks.

A check is a function `check_*(world)` of a module; `world` is the communicator of all ranks. Checks
run one after the other. Between two of them the ranks wait for each other without a message, so
that a rank whose check fails early disturbs no other check. After a check that hangs, ends a rank,
or raises anything but an AssertionError, the ranks are out of step: the launch is ended, and
another one runs the checks that are left.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from multibn.parity import launch as _launch
from tests.helpers import launch

START = 240.0  # seconds for all ranks to start
# Seconds for a check, and for the ranks to end: `make fuzz` has longer checks.
DEADLINE = 7000.0 if "MULTIBN_FUZZ" in os.environ else 200.0
GRACE = 5.0  # seconds for the other ranks when a check has failed on one
# Unbuffered, so that what a rank has printed is there when it hangs.
VARIABLES = launch.VARIABLES | {"PYTHONUNBUFFERED": "1"}
MAX_LAUNCHES = 12  # for the same checks
WORKER = "tests.harness.worker"  # the module that each rank runs


class Checks:
    """Checks for a launcher and a number of ranks.

    Parameters
    ----------
    names
        "module:function" of each check.
    deadline
        Seconds for each check: DEADLINE if None.
    grace
        Seconds for the other ranks when a check has failed on one.
    path
        PYTHONPATH of the ranks, if not this process's.
    """

    def __init__(
        self,
        launcher: str,
        size: int,
        names: Iterable[str],
        *,
        deadline: float | None = None,
        grace: float = GRACE,
        path: str = "",
    ) -> None:
        self.launcher, self.size, self.grace = launcher, size, grace
        self.deadline = DEADLINE if deadline is None else deadline
        # Read now: while the ranks start, a test may have changed a variable of this process.
        self._variables = _launch.environment() | VARIABLES | ({"PYTHONPATH": path} if path else {})
        self._complaints: dict[str, Future[str]] = {name: Future() for name in names}
        self._stop = threading.Event()

    def complaint(self, name: str) -> str:
        """Wait for the end of a check: "" if it passed on all ranks, else what became of it."""
        return self._complaints[name].result()

    def run(self) -> None:
        """Run all checks."""
        try:
            for _ in range(MAX_LAUNCHES):
                if (names := self._unfinished()) and not self._stop.is_set():
                    self._launch(names)
            text = f"not run: {MAX_LAUNCHES} launches were ended by checks before this one"
        except Exception as error:
            text = repr(error)
        self._finish(self._unfinished(), text)

    def stop(self) -> None:
        """End the launch."""
        self._stop.set()

    def _unfinished(self) -> list[str]:
        return [name for name, complaint in self._complaints.items() if not complaint.done()]

    def _finish(self, names: Iterable[str], text: str) -> None:
        for name in names:
            self._complaints[name].set_result(text)

    def _launch(self, names: Sequence[str]) -> None:
        """Run checks until one of them puts the ranks out of step."""
        with tempfile.TemporaryDirectory(prefix="multibn-checks-") as name:
            directory = Path(name)
            ranks = Ranks(directory, self.size)
            Path(directory, "spec").write_text(json.dumps([names, self.deadline]))
            worker = ["-m", WORKER, self.launcher, name]
            command = _launch.launch_command(self.launcher, self.size, worker)
            output = Path(directory, "output")
            with (
                output.open("w") as file,
                _launch.started(command, output=file, variables=self._variables) as process,
            ):
                why = self._follow(process, ranks, names)
            behind = int(ranks.progress.min())
            if behind == len(names) and not why:
                self._finish(names[-1:], ranks.complaint(len(names) - 1))
                return
            printed = output.read_text(errors="replace")
            if behind < 0 and launch.NOT_STARTED in printed:
                return
            at_fault = names[behind : behind + 1] or names[-1:]
            # Ranks that never started have failed all checks.
            self._finish(
                names if behind < 0 else at_fault,
                f"{self.launcher}, {self.size} ranks, {at_fault[0]}: {why}\n"
                f"{ranks.complaint(behind)}\n{printed[-8000:]}",
            )

    def _follow(self, process: subprocess.Popen[str], ranks: "Ranks", names: Sequence[str]) -> str:
        """Finish all checks that end in step, but the last; why the next does not, or ""."""
        behind, limit, why = -1, time.monotonic() + START, f"no start within {START:g} s"
        while not self._stop.wait(0.02):
            gone = process.poll() is not None  # asked before the news are read
            progress = int(ranks.progress.min())
            for number in range(max(behind, 0), min(progress, len(names) - 1)):
                self._finish([names[number]], ranks.complaint(number))
            if progress > behind:
                behind, limit = progress, time.monotonic() + self.deadline
                why = f"not over within {self.deadline:g} s"
            if gone:
                return f"exit status {process.returncode}" if process.returncode else ""
            ends = [ranks.end(rank, behind) for rank in range(self.size)]
            failed = [rank for rank, end in enumerate(ends) if end and end.error]
            if failed and (soon := time.monotonic() + self.grace) < limit:
                limit = soon
                why = f"not over within {self.grace:g} s after the error on rank(s) {failed}"
            if time.monotonic() > limit:
                return why
            if all(ends) and any(end and not end.in_step for end in ends):
                return "the ranks are out of step"
        return "stopped"


class End(NamedTuple):
    """How a check ended on a rank."""

    error: str  # "" if it passed
    in_step: bool  # whether the rank has done all that the other ranks expect of it


class Ranks:
    """The files of a launch, by which its ranks tell how far they are.

    Attributes
    ----------
    progress
        How many checks each rank has behind it; -1 before the ranks have met.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._directory, path = directory, directory / "progress"
        if not path.exists():
            path.write_bytes(np.full(size, -1).tobytes())
        self.progress = np.memmap(path, np.int64, "r+")

    def printed(self, rank: int) -> Path:
        """Where this rank prints, emptied before each check."""
        return self._directory / f"{rank}.printed"

    def note(self, rank: int, end: End) -> None:
        """Say how this rank's next check has ended."""
        with self._ends(rank).open("a") as file:
            file.write(json.dumps(end) + "\n")

    def end(self, rank: int, number: int) -> End | None:
        """How a check ended; None if it has not."""
        path = self._ends(rank)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        line = lines[number] if 0 <= number < len(lines) else ""
        return End(*json.loads(line)) if line.endswith("\n") else None

    def complaint(self, number: int) -> str:
        """What all ranks say about a check; "" if it passed on all of them."""
        ends = [self.end(rank, number) for rank in range(len(self.progress))]
        if all(end and not end.error for end in ends):
            return ""
        return "\n".join(f"rank {rank}: {self._says(rank, end)}" for rank, end in enumerate(ends))

    def _says(self, rank: int, end: End | None) -> str:
        if end:
            return end.error or "passed"
        path = self.printed(rank)
        return "no end\n" + (path.read_text(errors="replace")[-8000:] if path.exists() else "")

    def _ends(self, rank: int) -> Path:
        return self._directory / f"{rank}.ends"
