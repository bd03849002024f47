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
from faults.scenarios import SCENARIOS

ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    for name, known in (("parts", parts.PARTS), ("faults", SCENARIOS)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=known, default=[*known], metavar="NAME",
            help="default: all; the others keep what the file says",
        )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIRECTORY",
                        help="default: faults/results, and docs/faults.md")  # fmt: skip
    arguments = parser.parse_args(argv)
    output = arguments.output or ROOT / "faults/results"
    output.mkdir(parents=True, exist_ok=True)
    path = output / "faults.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results = {name: earlier[name] for name in parts.PARTS if name in earlier}
    results["machine"] = machine.describe()
    complaints = []
    for name in arguments.parts:
        start = time.monotonic()
        kept = [row for row in results.get(name, []) if row["scenario"] not in arguments.faults]
        results[name] = kept
        for row in map(parts.row, parts.PARTS[name](arguments.faults)):
            report.show(row)
            kept.append(row)
            complaints += [row["complaint"]] * bool(row["complaint"])
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "docs/faults.md"
    if arguments.output:
        page = Path(shutil.copy(page, arguments.output))
    report.write(results, page)
    print(f"{len(complaints)} not as it should be")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
