"""One rank of a part: `python -m benchmarks.gpu.worker PART DIRECTORY`.

Writes each row as soon as there is one, so that rows outlast a crash.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.gpu.parts import PARTS


def main(name: str, directory: str) -> None:
    module, _, function = PARTS[name].rows.partition(".")
    with Path(directory, f"{os.getpid()}.jsonl").open("w") as file:
        rows = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        for row in rows():
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
