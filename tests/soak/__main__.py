"""Trains for ten minutes in many ways, counts what the ranks hold, and writes docs/soak.md.

The exit status is 1 if anything grew on a rank.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

from multibn import _launch
from tests.helpers import launch

# The shares of the time; 32 ranks spend most of theirs on the import of torch.
_RUNS = [
    *(("torchrun", ranks, share) for ranks, share in ((2, 0.25), (4, 0.1), (8, 0.1), (16, 0.05))),
    *(("mpiexec", ranks, share) for ranks, share in ((2, 0.25), (4, 0.1), (8, 0.1), (32, 0.05))),
]
_DEADLINE = 900.0  # seconds beyond a run's share
_HEAD = """# What a long run holds

Written by `make soak`: each line is one deed, done again and again on all ranks, with what rank 0
held after the first half of the turns and at the end. A run fails if a rank holds more descriptors,
threads, groups or duplicates of MPI communicators at the end, or 16 MB more memory.

| launcher | ranks | deed | turns | MB | descriptors | threads | groups | MPI duplicates |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=32, help="the most ranks")
    arguments = parser.parse_args()
    lines, failed = [], False
    for launcher, ranks, share in _RUNS:
        if ranks > arguments.ranks:
            continue
        seconds = arguments.seconds * share
        with tempfile.TemporaryDirectory() as name:
            file = Path(name, "rows")
            worker = ["-m", "tests.soak.worker", launcher, str(seconds), str(file)]
            command = _launch.launch_command(launcher, ranks, worker)
            ran = _launch.run(command, timeout=seconds + _DEADLINE, variables=launch.VARIABLES)
            if ran.returncode or not file.exists():
                print(f"{launcher}, {ranks} ranks: failed\n{ran.stdout[-4000:]}", flush=True)
                failed = True
                continue
            for deed, turns, before, after in json.loads(file.read_text()):
                held = [f"{b:.0f} → {a:.0f}" for b, a in zip(before, after, strict=True)]
                lines.append(f"| {' | '.join([launcher, str(ranks), deed, str(turns), *held])} |")
                print(lines[-1], flush=True)
    if not failed:
        end = f"\nPython {platform.python_version()}, {arguments.seconds:g} s.\n"
        Path("docs/soak.md").write_text(_HEAD + "\n".join(lines) + "\n" + end)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
