"""python -m tests.mutants NUMBER SEED: makes deliberate mistakes, and prints those unseen by tests.

Each is made in a copy. It meets the tests of its own room, then all that need no ranks, then the
checks of its room on ranks, until one fails. Lines that no test without ranks runs are left alone.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage

from multibn import _launch
from tests.helpers.launch import ROOT
from tests.mutants.candidates import Mutant, draw

GOAL = 0.97  # killed of killed and survived
LIMIT = 1800.0  # seconds for a run of pytest, on a busy machine
WITHOUT_RANKS = ("-q", "-m", "not launches", "--ignore=tests/originals")


def _run(tree: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run Python in a tree: its exit status, or -1 after the limit, and what is printed."""
    command = ["env", "-C", str(tree), sys.executable, *arguments]
    try:
        ran = _launch.run(command, timeout=LIMIT, variables={"PYTHONPATH": str(tree), **variables})
    except subprocess.TimeoutExpired as expired:
        return -1, str(expired.output)
    return ran.returncode, ran.stdout


def _built(tree: Path) -> bool:
    built = [*tree.glob("multibn/**/*.so")]
    for path in built:
        path.unlink()
    _run(tree, "setup.py", "-q", "build_ext", "--inplace")
    return all(path.exists() for path in built)


def _lines_run(base: Path) -> dict[str, set[int]]:
    """By the path of a file in Python, the lines that tests without ranks run."""
    data = str(base / "lines")
    options = ["--source=multibn", f"--data-file={data}"]
    print(_run(base, "-m", "coverage", "run", *options, "-m", "pytest", *WITHOUT_RANKS)[1][-500:])
    lines = coverage.CoverageData(data)
    lines.read()
    files = lines.measured_files()
    return {str(Path(file).relative_to(base)): set(lines.lines(file) or ()) for file in files}


def _meet(base: Path, mutant: Mutant, source: str) -> tuple[str, str]:
    """How a mutant ends, and the first test that has failed."""
    if mutant.text(source) in Path(__file__).with_name("equivalent.txt").read_text():
        return "equivalent", ""
    parts = Path(mutant.path).parts[1:-1] or ("command",)
    room, inner = Path("tests", parts[0]), Path("tests", *parts[:2])
    own = inner if (base / inner).is_dir() else room
    with tempfile.TemporaryDirectory(prefix="multibn-mutant-") as name:
        tree = shutil.copytree(base, Path(name, "tree"))
        Path(tree, mutant.path).write_text(mutant.change(source), "latin-1")
        if not mutant.path.endswith(".py") and not _built(tree):
            return "not built", ""
        for tests, *options in (
            *((own, *WITHOUT_RANKS), ("tests", *WITHOUT_RANKS)),
            (room, "-q", "-m", "launches"),
        ):
            options += ["-x", "-o", "timeout=120"]
            status, text = _run(tree, "-m", "pytest", str(tests), *options)
            if status not in (0, 5):  # 5: there are no such tests
                failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.M)
                return "killed", failed[1] if failed else f"exit status {status}"
    return "survived", ""


def main(number: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="multibn-mutants-") as folder:
        ignored = shutil.ignore_patterns(".git", ".venv", ".nox", ".*_cache", "build", "out")
        base = shutil.copytree(ROOT, Path(folder, "base"), ignore=ignored)
        paths = [p for kind in ("py", "c", "h") for p in base.glob(f"multibn/**/*.{kind}")]
        sources = {str(path.relative_to(base)): path.read_text("latin-1") for path in paths}
        mutants = draw(sources, _lines_run(base), number, seed)
        ends: Counter[str] = Counter()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            met = pool.map(lambda mutant: _meet(base, mutant, sources[mutant.path]), mutants)
            for m, (end, why) in zip(mutants, met, strict=True):
                ends[end] += 1
                where = f"{m.path}:{m.line(sources[m.path])}"
                print(f"{end}: {where} {why}\n{m.text(sources[m.path])}", end="", flush=True)
    judged = ends["killed"] + ends["survived"]
    print(f"seed {seed}: {ends['killed']} of {judged} killed; {dict(ends)}")
    return int(ends["killed"] < GOAL * judged)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
