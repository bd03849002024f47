"""Measurements on ranks; one rank is `python -m benchmarks.worker FUNCTION OVER OPTIONS DIRECTORY`.

FUNCTION is "package.module.function", and OPTIONS are JSON. The function takes a communicator and
the options, and returns arrays and notes.
"""

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from multibn._launch import LAUNCHERS, Written, enter_world, leave_world, run_workers, write

# The libraries read these variables when they are loaded. glibc keeps freed memory, for all steps
# alike: otherwise a step may give its memory back to the system, and fault the pages in again,
# depending on what other steps have freed. That takes more time than any layer, and at random.
_VARIABLES = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # the largest value that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}


def run(
    function: str,
    over: str,
    size: int = 2,
    /,
    *,
    timeout: float = 240.0,
    variables: Mapping[str, str] = _VARIABLES,
    **options: Any,
) -> list[Written]:
    """The measurements of each rank. Raises WorkerError."""
    worker = ["-m", "benchmarks.worker", function, over, json.dumps(options)]
    name = f"{function} over {over}, {size} rank(s)"
    return run_workers(name, LAUNCHERS[over], size, worker, timeout=timeout, variables=variables)


def main(path: str, over: str, options: str, directory: str) -> None:
    communicator = enter_world(over)
    # A core of its own for each rank, if there are enough cores.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if communicator.size <= (os.cpu_count() or 1) and over != "gloo" and len(cores) > 1:
        os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    module, _, function = path.rpartition(".")
    measure = getattr(import_module(module), function)
    arrays, notes = measure(communicator, **json.loads(options))
    write(directory, communicator.rank, arrays, notes)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
