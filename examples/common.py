"""Options, hyperparameters, initial weights and log of the training scripts."""

import argparse
import json
import math
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

LEARNING_RATE = 0.02
MOMENTUM = 0.9


def parse_args(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--norm",
        choices=["plain", "sync"],
        default="sync",
        help="statistics of each rank's part of a batch (plain), or of all of it (sync, default)",
    )
    parser.add_argument("--steps", type=int, default=525, help="default: 525, three epochs")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--output", type=Path, help="file to append JSON lines to; default: print")
    return parser.parse_args()


def initial_weight(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a He-normal weight that depends only on the layer's name and shape."""
    rng = np.random.default_rng(crc32(name.encode()))
    fan_in = math.prod(shape[1:])
    return rng.normal(scale=math.sqrt(2 / fan_in), size=shape)


def write_line(output: Path | None, **entry: float) -> None:
    line = json.dumps(entry)
    if output is None:
        print(line, flush=True)
        return
    with output.open("a") as file:
        file.write(line + "\n")
