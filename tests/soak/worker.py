"""One rank: python -m tests.soak.worker LAUNCHER SECONDS DIRECTORY."""

import resource
import sys
from typing import Any

from multibn._launch import enter_world, leave_world, write
from tests.soak import figures
from tests.soak.deeds import deeds_of, hold

_DESCRIPTORS = 128  # a limit that other programs run under, for 2 ranks


def main(launcher: str, seconds: str, directory: str) -> None:
    for i in range(200_000):  # Python's table of names doubles once, by 4 MB: not in a deed
        sys.intern(f"name {i}")
    world = enter_world({"torchrun": "gloo", "mpiexec": "mpi"}[launcher])
    results: dict[str, Any] = {}
    if world.size == 2:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, most))
    if world.size < 32:
        results["widths"] = figures.of_widths(world)
    deeds = deeds_of(world)
    results["rows"] = [hold(deed, world, float(seconds) / len(deeds)) for deed in deeds]
    write(directory, world.rank, {}, results)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
