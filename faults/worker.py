"""One rank: `python -m faults.worker SPEC DIRECTORY`, SPEC being JSON, see `Job`.

Writes a line of JSON to `DIRECTORY/RANK.jsonl` when a scenario starts, at the fault, and at its
end; `DIRECTORY/RANK.crash` holds what a signal has ended.
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
from faults.trial import Trial


class Record:
    """What becomes of this rank, line by line."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = (directory / f"{rank}.jsonl").open("a", buffering=1)

    def write(self, event: str, **details: Any) -> None:
        line = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **details}
        self._file.write(json.dumps(line) + "\n")


def main(spec: str, directory: str) -> None:
    options = json.loads(spec)
    names, earlier = options.pop("scenarios"), options.pop("earlier")
    world = worlds.enter(**options, count=len(names))
    record = Record(Path(directory), world.rank)
    if earlier:
        record.write("start", scenario="")
        for name, communicator in zip(names, world.communicators, strict=True):
            if run := SCENARIOS[name].earlier:
                run(Trial(world, communicator, lambda: None))
        return
    crash = Path(directory, f"{world.rank}.crash").open("w")  # noqa: SIM115 (until the end)
    faulthandler.enable(crash)  # after MPI's own handlers
    Trial(world, world.alone, lambda: None).warm_up()
    for name, communicator in zip(names, world.communicators, strict=True):
        record.write("start", scenario=name)
        _run(name, world, communicator, record)
        (Path(directory) / f"{name}.{world.rank}.done").touch()
        while any(not Path(directory, f"{name}.{r}.done").exists() for r in range(world.size)):
            if SCENARIOS[name].ends:
                return
            time.sleep(0.005)


def _run(name: str, world: worlds.World, communicator: Any, record: Record) -> None:
    chosen = SCENARIOS[name]
    try:
        trial = Trial(world, communicator, lambda: record.write("fault", scenario=name))
        chosen.run(trial)
    except BaseException as error:
        # As the interpreter prints it.
        text = f"{type(error).__name__}: {error}"
        record.write("end", scenario=name, error=text)
        if chosen.ends:
            raise
        return
    record.write("end", scenario=name)
    digest = hashlib.sha256(trial.trainee.statistics().tobytes()).hexdigest()
    record.write("numbers", scenario=name, off=trial.error(), digest=digest)


if __name__ == "__main__":
    main(*sys.argv[1:])
