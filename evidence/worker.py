"""One rank of a study: `python -m evidence.worker STUDY SEEDS DIRECTORY`."""

import importlib
import sys
import warnings

from evidence import EXAMPLES
from multibn._launch import enter_world, leave_world, write


def main(name: str, seeds: str, directory: str) -> None:
    # torch 2.13 offers no other way to leave the buffers alone, at the start as in each step.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    sys.path.append(EXAMPLES)
    study = importlib.import_module(f"evidence.{name}")
    rank = enter_world("gloo").rank
    rows = [{"seed": seed, **row} for seed in range(int(seeds)) for row in study.measure(seed)]
    write(directory, rank, {}, {"rows": rows})
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
