"""One rank of a study: `python -m evidence.worker STUDY SEEDS FILE`."""

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist


def main(name: str, seeds: int, path: Path) -> None:
    # torch 2.13 offers no other way to leave the buffers alone, at the start as in each step.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    study = importlib.import_module(f"evidence.{name}")
    dist.init_process_group("gloo")
    rows = [{"seed": seed, **row} for seed in range(seeds) for row in study.measure(seed)]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
