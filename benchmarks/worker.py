"""One rank of a part: `python -m benchmarks.worker PART OPTIONS DIRECTORY`, OPTIONS being JSON.

Writes times and notes; `parts` compares them.
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

# The module and the function of each part, and the communicator that the function gets.
PARTS = {
    "layer torch": ("layer", "measure_torch", "mpi"),
    "layer chainer": ("layer", "measure_chainer", "chainermn naive"),
    "resnet": ("resnet", "measure", "mpi"),
    "compiled": ("compiled", "measure", "mpi"),
    "calls mpi": ("calls", "measure", "mpi"),
    "calls gloo": ("calls", "measure", "gloo"),
    "messages mpi": ("messages", "measure", "mpi"),
    "messages gloo": ("messages", "measure", "gloo"),
    "collectives mpi": ("collectives", "measure", "mpi"),
    "collectives gloo": ("collectives", "measure", "gloo"),
    "reversible memory": ("reversible", "measure_memory_of", "single process"),
    "reversible time": ("reversible", "measure_time", "single process"),
}


def main(part: str, options: str, directory: str) -> None:
    module, function, over = PARTS[part]
    communicator = enter_world(over)
    # A core of its own for each rank, if there are enough cores.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if communicator.size <= (os.cpu_count() or 1) and over != "gloo" and len(cores) > 1:
        os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    if function != "measure_memory_of":
        keep_freed_memory()
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    times, notes = measure(communicator, **json.loads(options))
    write(directory, communicator.rank, times, notes)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
