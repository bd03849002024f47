"""One rank: python -m tests.soak.worker LAUNCHER SECONDS FILE, which gets rank 0's rows."""

import json
import sys
from pathlib import Path

from multibn._launch import enter_world, leave_world
from tests.soak.deeds import DEEDS, hold, inits


def main(launcher: str, seconds: str, file: str) -> None:
    world = enter_world({"torchrun": "gloo", "mpiexec": "mpi"}[launcher])
    rows = []
    deeds = DEEDS if launcher == "torchrun" else [deed for deed in DEEDS if deed is not inits]
    for deed in deeds:
        row = hold(deed, world, float(seconds) / len(deeds))
        if growth := row.after.growth(row.before):
            raise AssertionError(f"rank {world.rank}, {row.deed}: {growth}")
        rows.append(row)
    if world.rank == 0:
        Path(file).write_text(json.dumps(rows))
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
