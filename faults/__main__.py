"""Tries out what goes wrong in distributed training, and reports what the user sees of it.

Starts real processes under real launchers. Writes faults.json and docs/faults.md. The exit status
is 1 if a fault was not met as it should be.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from faults import parts, report

ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--parts", default=",".join(parts.PARTS), metavar="NAME,...",
                        help="default: all; the others keep what the file says")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIRECTORY",
                        help="default: faults/results, and docs/faults.md")  # fmt: skip
    parser.add_argument("--faults", metavar="NAME,...", help="default: all; as --parts")
    arguments = parser.parse_args(argv)
    if arguments.faults:
        parts.chosen[:] = arguments.faults.split(",")
    names = arguments.parts.split(",")
    if unknown := set(names) - set(parts.PARTS):
        parser.error(f"--parts must be of {', '.join(parts.PARTS)}: got {', '.join(unknown)}")
    output = arguments.output or ROOT / "faults/results"
    output.mkdir(parents=True, exist_ok=True)
    path = output / "faults.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results = {name: earlier[name] for name in parts.PARTS if name in earlier}
    results["machine"] = machine.describe()
    for name in names:
        start = time.monotonic()
        kept = [row for row in results.get(name, []) if row["scenario"] not in parts.chosen]
        results[name] = kept + parts.PARTS[name](report.show)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "docs/faults.md"
    if arguments.output:
        page = Path(shutil.copy(page, arguments.output))
    report.write(results, page)
    report.summarize(results)
    return int(any(row["complaint"] for name in names for row in results[name]))


if __name__ == "__main__":
    sys.exit(main())
