"""Tries converted models in other people's programs, on two ranks, and writes docs/programs.md.

The exit status is 1 if a row of the table fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from multibn import _launch
from tests.programs import report
from tests.programs.row import Row

PAGE = Path(__file__).parents[2] / "docs/programs.md"
SIZE = 2
DEADLINE = 1200.0  # seconds for a launch


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""],
                        help="rows whose name has such a text; prints the page")  # fmt: skip
    only = parser.parse_args(argv).only
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        complaint = _launch_all(directory, only)
        paths = sorted(Path(directory).iterdir(), key=lambda path: path.stem)
        rows = [Row(**json.loads(path.read_text())) for path in paths]
    page = report.page(rows, time.monotonic() - start)
    if only == [""] and not complaint:
        PAGE.write_text(page)
    else:
        print(page)
    failing = [row for row in rows if row.complaint]
    for row in failing:
        print(f"FAILS: {row.program}, {row.tried}: {row.complaint}")
    print(complaint or f"{len(rows)} rows, {len(failing)} of them fail")
    return int(bool(failing or complaint))


def _launch_all(directory: str, only: Sequence[str]) -> str:
    """Start ranks until all rows are written; returns why this was not possible, or ""."""
    worker = ["-m", "tests.programs.worker", directory, *only]
    command = _launch.launch_command("torchrun", SIZE, worker)
    while True:  # a row that raises ends its launch, and the next one goes on after this row
        before = len(list(Path(directory).iterdir()))
        with _launch.started(command, output=sys.stdout) as process:
            try:
                if process.wait(DEADLINE) == 0:
                    return ""
            except subprocess.TimeoutExpired:
                return f"the ranks did not end within {DEADLINE:g} s"
        if len(list(Path(directory).iterdir())) == before:
            return "the ranks ended without a row"


if __name__ == "__main__":
    sys.exit(main())
