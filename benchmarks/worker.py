"""One rank of a part: `python -m benchmarks.worker FUNCTION OVER OPTIONS DIRECTORY`.

FUNCTION is "module.function" of this package, OPTIONS are JSON. Writes times and notes; `parts`
compares them.
"""

import importlib
import json
import os
import sys

# The libraries read these variables when they are loaded, so before the imports below.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
os.environ.update(dict.fromkeys(_THREADS, "1"))

from benchmarks.timing import keep_freed_memory  # noqa: E402
from multibn._launch import enter_world, leave_world, write  # noqa: E402


def main(path: str, over: str, options: str, directory: str) -> None:
    module, _, function = path.partition(".")
    communicator = enter_world(over)
    # A core of its own for each rank, if there are enough cores.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if communicator.size <= (os.cpu_count() or 1) and over != "gloo" and len(cores) > 1:
        os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    if function != "measure_memory":
        keep_freed_memory()
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    times, notes = measure(communicator, **json.loads(options))
    write(directory, communicator.rank, times, notes)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
