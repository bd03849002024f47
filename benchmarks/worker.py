"""Measurements on ranks: functions of a communicator and options that return arrays and notes."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeAlias

from multibn.check.timing import Seconds
from multibn.communicators import Communicator
from multibn.parity.launch import run_workers

Measured: TypeAlias = tuple[Mapping[str, Seconds], dict[str, Any]]  # by name, and notes

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
) -> list[Any]:
    """The arrays, as lists, and the notes of each rank of "package.module.function" `over` this
    communicator. Raises WorkerError.
    """
    arguments = {"function": function, "over": over, "options": options}
    return run_workers(
        "benchmarks.worker.measure", over, size, timeout=timeout, variables=variables, **arguments
    )


def measure(communicator: Communicator, function: str, over: str, options: dict[str, Any]) -> Any:
    """Call the function, on a core of its own for each rank, if there are enough cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if communicator.size <= (os.cpu_count() or 1) and over != "gloo" and len(cores) > 1:
        os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    module, _, name = function.rpartition(".")
    return getattr(import_module(module), name)(communicator, **options)
