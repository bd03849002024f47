"""Runs the tests that need no ranks, and writes docs/versions.md.

The exit status is that of pytest.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import put
from tests.versions import report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "out/versions"  # one file for each set; the table is made of all of them
# Not those of the page that this run is to write.
ELSEWHERE = ("tests/originals", "tests/command/test_versions.py")
TESTS = ("-m", "not launches", *(f"--ignore={path}" for path in ELSEWHERE))


def main(argv: Sequence[str]) -> int:
    name, *tests = argv
    RESULTS.mkdir(parents=True, exist_ok=True)
    junit = RESULTS / f"{name}.xml"
    commit = report.commit(ROOT)
    options = ["-q", "-p", "no:cacheprovider", "--junitxml", str(junit)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(tests or TESTS)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    row = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "versions": {"Python": platform.python_version()} | report.installed(),
        "outcome": report.outcome(junit),
    }
    if not tests:
        Path(RESULTS, f"{name}.json").write_text(json.dumps(row, indent=1))
    rows = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    put(ROOT / "docs/versions.md", "results", report.text(rows))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
