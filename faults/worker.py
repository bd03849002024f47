"""One rank: `python -m faults.worker SPEC DIRECTORY`; SPEC is the JSON that `Job` makes.

Writes a line of JSON to `DIRECTORY/RANK.jsonl` when a scenario starts, at the fault, and when the
scenario ends. `DIRECTORY/RANK.printed` is the output of the rank, without the launcher's.
`DIRECTORY/RANK.crash` is the output of faulthandler if a signal kills the rank.
"""

import faulthandler
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from faults import worlds
from faults.scenarios import SCENARIOS
from faults.setups import SETUPS
from faults.trial import Trial


class Record:
    """The log of this rank, a line of JSON per event."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = (directory / f"{rank}.jsonl").open("a", buffering=1)
        # From now on, stdout and stderr of this process go to a separate file.
        printed = os.open(directory / f"{rank}.printed", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(printed, sys.stdout.fileno())
        os.dup2(printed, sys.stderr.fileno())

    def write(self, event: str, scenario: str, **details: Any) -> None:
        line = {"event": event, "scenario": scenario, "at": time.monotonic(), "pid": os.getpid()}
        self._file.write(json.dumps(line | details) + "\n")

    def mark(self, name: str) -> None:
        """Record that the fault is about to happen."""
        self.write("fault", name, printed=os.fstat(sys.stderr.fileno()).st_size)


def main(spec: str, directory: str) -> None:
    options = json.loads(spec)
    names, earlier = options["scenarios"], options["earlier"]
    world = worlds.enter(SETUPS[options["setup"]], options["files"], len(names))
    if earlier:
        for i, name in enumerate(names):
            if run := SCENARIOS[name].earlier:
                run(Trial(world, world.communicator(i), lambda: None))
        return
    record = Record(Path(directory), world.rank)
    crash = Path(directory, f"{world.rank}.crash").open("w")  # noqa: SIM115 (until the end)
    faulthandler.enable(crash)  # after MPI's own handlers
    Trial(world, world.alone, lambda: None).warm_up(everything=len(names) > 1)
    # The deadline is short: ranks must not start while others still compile.
    _wait_for_all(Path(directory), "ready", world)
    for i, name in enumerate(names):
        record.write("start", name)
        ends = SCENARIOS[name].ends_in(SETUPS[options["setup"]])
        _run(name, world, i, record, ends)
        if ends:
            return
        _wait_for_all(Path(directory), f"{name}.done", world)


def _wait_for_all(directory: Path, point: str, world: worlds.World) -> None:
    """Wait until all ranks have reached `point`, by files instead of messages."""
    (directory / f"{world.rank}.{point}").touch()
    while any(not (directory / f"{r}.{point}").exists() for r in range(world.size)):
        time.sleep(0.005)


def _run(name: str, world: worlds.World, number: int, record: Record, ends: bool) -> None:
    try:
        trial = Trial(world, world.communicator(number), lambda: record.mark(name))
        SCENARIOS[name].run(trial)
    except BaseException as error:
        # The text that Python would print.
        record.write("end", name, error=f"{type(error).__name__}: {error}")
        if ends:
            raise
        return
    record.write("end", name)
    digest = hashlib.sha256(trial.trainee.statistics().tobytes()).hexdigest()
    record.write("numbers", name, off=trial.error(), digest=digest)


if __name__ == "__main__":
    main(*sys.argv[1:])
