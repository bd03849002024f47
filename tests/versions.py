"""The tests that need no ranks, with one set of versions, and the table of all sets: noxfile.py.

`python -m tests.versions NAME` writes tests/versions.md. The exit status is that of pytest.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.tables import markdown, put

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "out/versions"  # one file for each set; the table is made of all of them
# Not those of the page that this run is to write.
ELSEWHERE = ("tests/originals", "tests/command/test_versions.py")
TESTS = ("-m", "not launches", *(f"--ignore={path}" for path in ELSEWHERE))

PACKAGES = {
    "torch": ["torch"],
    "Triton": ["triton"],
    "NumPy": ["numpy"],
    "CuPy": ["cupy-cuda12x", "cupy-cuda13x"],
    "Chainer": ["chainer"],
    "flax": ["flax"],
}
COUNTS = ("passed", "failed", "skipped")
COLUMNS = ("set", "Python", *PACKAGES, *COUNTS, "date", "commit")
TESTED = ("multibn", "tests", "pyproject.toml", "setup.py")


def installed() -> dict[str, str]:
    """The versions of PACKAGES in this environment."""
    versions = {each.name.lower(): each.version for each in metadata.distributions()}
    names = {title: [name for name in PACKAGES[title] if name in versions] for title in PACKAGES}
    return {title: versions[present[0]] if present else "-" for title, present in names.items()}


def commit(root: Path) -> str:
    """The last commit that changed TESTED, with a + if files differ from that commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments, "--", *TESTED]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h") + "+" * bool(git("status", "--porcelain"))


def outcome(junit: Path) -> dict[str, Any]:
    """Numbers of tests, and why tests did not pass, from pytest's JUnit file."""
    counts = dict.fromkeys(COUNTS, 0)
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        ends = {part.tag: part.get("message", "").split("\n")[0] for part in case}
        bad = ends.get("failure", ends.get("error"))
        if bad is not None:
            counts["failed"] += 1
            reasons[f"failed: `{case.get('classname')}.{case.get('name')}`: {bad}"] += 1
        elif "skipped" in ends:
            counts["skipped"] += 1
            reasons[f"skipped: {ends['skipped']}"] += 1
        else:
            counts["passed"] += 1
    return counts | {"reasons": sorted(reasons.items())}


def text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table, the oldest torch first, and why tests did not pass."""
    ordered = sorted(rows, key=lambda row: numbers(row["versions"]["torch"]))
    reasons = [
        f"- {row['name']}: {number} {reason}"
        for row in ordered
        for reason, number in row["outcome"]["reasons"]
    ]
    table = markdown(COLUMNS, map(_line, ordered))
    return "\n".join([table, "", "Failed and skipped tests, with their numbers:", "", *reasons])


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _line(row: Mapping[str, Any]) -> Sequence[str]:
    counts = (str(row["outcome"][count]) for count in COUNTS)
    return (row["name"], *row["versions"].values(), *counts, row["date"], row["commit"])


def main(argv: Sequence[str]) -> int:
    name, *tests = argv
    RESULTS.mkdir(parents=True, exist_ok=True)
    junit = RESULTS / f"{name}.xml"
    tested = commit(ROOT)
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
        "commit": tested,
        "versions": {"Python": platform.python_version()} | installed(),
        "outcome": outcome(junit),
    }
    if not tests:
        Path(RESULTS, f"{name}.json").write_text(json.dumps(row, indent=1))
    rows = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    put(ROOT / "tests/versions.md", "results", text(rows))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
