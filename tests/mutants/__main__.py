"""python -m tests.mutants NUMBER SEED: makes deliberate mistakes, and prints those unseen by tests.

Each is made in a copy, and meets tests that run its line, checks on ranks among them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import coverage

from multibn.parity import launch as _launch
from tests.helpers.launch import ROOT
from tests.mutants.candidates import Mutant, draw

GOAL = 0.97  # killed of killed and survived
SECONDS = 150.0  # of tests that a mutant meets; a check on ranks counts as one
FEW = 40  # tests that run a line; those of a cached function may all read what one has computed
LIMIT = 900.0  # seconds for a run of pytest, on a busy machine
PYTEST = "-m", "pytest", "-q", "-p", "tests.mutants.recorder"
# An endless loop in C ends with the process alone: Python's signals, as of pytest-timeout, wait.
ENDLESS = "-o", "faulthandler_timeout=120", "-o", "faulthandler_exit_on_timeout=true"
EQUIVALENT = Path(__file__).with_name("equivalent.txt").read_text()
# In a process of its own, because Triton reads at its import that it interprets.
INTERPRETED = "tests/kernels/test_cuda.py::test_the_checks_pass_in_the_interpreter"
OF_A_GPU = "multibn/kernels/cuda.py", "multibn/kernels/triton/"


def _run(tree: Path, *arguments: str, limit: float = LIMIT, record: str = "") -> tuple[int, str]:
    """Run Python in a tree: its exit status, or -1 after the limit, and what is printed."""
    command = ["env", "-C", str(tree), sys.executable, *arguments]
    variables = {"PYTHONPATH": str(tree), "MULTIBN_RECORD": record}
    try:
        ran = _launch.run(command, timeout=limit, variables=variables)
    except subprocess.TimeoutExpired as expired:
        return -1, str(expired.output)
    return ran.returncode, ran.stdout


def _meet(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    Path(tree, "tests.txt").write_text("\n".join(tests))
    return _run(tree, *PYTEST, "-x", *ENDLESS, "@tests.txt")


def _built(tree: Path) -> bool:
    built = [*tree.glob("multibn/**/*.so")]
    for path in built:
        path.unlink()
    _run(tree, "setup.py", "-q", "build_ext", "--inplace")
    return all(path.exists() for path in built)


class Tests:
    """The tests that pass in a tree, without those that spend their time in other processes."""

    def __init__(self, base: Path, record: str) -> None:
        self._base = base
        options = [*PYTEST, "-m", "not beside and not alone", "--continue-on-collection-errors"]
        print(_run(base, *options, limit=10 * LIMIT, record=record)[1][-500:])
        lines = coverage.Coverage(f"{record}/lines", config_file=False)
        lines.combine()
        self._lines = lines.get_data()
        self._seconds: dict[str, float] = json.loads(Path(record, "seconds").read_text())
        self._seconds[INTERPRETED] = 0.0

    def of(self, path: str) -> dict[int, set[str]]:
        """The lines of a file that are run, and the tests that do; in line 0, of C and of a GPU."""
        if path.startswith(OF_A_GPU):
            return {0: {test for test in self._seconds if test.startswith("tests/kernels/")}}
        if not path.endswith(".py"):
            return {0: {*self._seconds}}
        found = self._lines.contexts_by_lineno(str(self._base / path))
        return {line: self._seconds.keys() & tests for line, tests in found.items()}

    def _chosen(self, mutant: Mutant) -> list[str]:
        """Tests of the line, its room's first: the cheapest of each file, then each file's next."""
        of = self.of(mutant.path)
        run = [n for n in of if not n or not mutant.lines or n in mutant.lines]
        tests = line = set[str]().union(*(of[n] for n in run))
        if run and len(line) < FEW:
            tests = set[str]().union(*of.values())
        turns, key = Counter[str](), dict[str, tuple[bool, bool, int]]()
        for test in sorted(tests, key=lambda test: (self._seconds[test], test)):
            file = test.split("::")[0]
            turns[file] += 1
            same_room = file.split("/")[1] == mutant.path.split("/")[1]
            key[test] = test not in line, not same_room, turns[file]
        order = sorted(key, key=key.__getitem__)
        took = accumulate(self._seconds[test] for test in order)
        return [test for test, seconds in zip(order, took, strict=True) if seconds < SECONDS]

    def meet(self, mutant: Mutant, source: str) -> tuple[str, str]:
        """How a mutant ends: the test that has failed, or how many have not."""
        if mutant.text(source) in EQUIVALENT:
            return "equivalent", ""
        tests = self._chosen(mutant)
        if not tests:
            return "never run", ""
        with tempfile.TemporaryDirectory(prefix="multibn-mutant-") as name:
            tree = shutil.copytree(self._base, Path(name, "tree"))
            Path(tree, mutant.path).write_text(mutant.change(source), "latin-1")
            if not mutant.path.endswith(".py") and not _built(tree):
                return "not built", ""
            status, text = _meet(tree, tests)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.M)
        if status:
            return "killed", failed[1] if failed else f"exit status {status}"
        return "survived", f"{len(tests)} tests"


def main(number: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="multibn-mutants-") as folder:
        ignored = shutil.ignore_patterns(".git", ".venv", ".nox", ".*_cache", "build", "out")
        base = shutil.copytree(ROOT, Path(folder, "base"), ignore=ignored)
        paths = [p for kind in ("py", "c", "h") for p in base.glob(f"multibn/**/*.{kind}")]
        sources = {str(path.relative_to(base)): path.read_text("latin-1") for path in paths}
        tests = Tests(base, folder)
        unseen = [path for path in sources if not any(tests.of(path).values())]
        print(f"left out, because no test runs a line of them: {unseen}")
        mutants = draw({p: s for p, s in sources.items() if p not in unseen}, number, seed)
        ends, killers = Counter[str](), dict[str, None]()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            met = pool.map(lambda mutant: tests.meet(mutant, sources[mutant.path]), mutants)
            for m, (end, why) in zip(mutants, met, strict=True):
                ends[end] += 1
                killers |= {why: None} if end == "killed" and "::" in why else {}
                where = f"{m.path}:{sources[m.path].count(chr(10), 0, m.start) + 1}"
                print(f"{end}: {where} {why}\n{m.text(sources[m.path])}", end="", flush=True)
        print(f"seed {seed}: {dict(ends)}")
        status, text = _meet(base, killers) if killers else (0, "")
        print(f"without a mistake, tests that have killed fail:\n{text}" if status else "")
        return int(status != 0 or ends["killed"] < GOAL * (ends["killed"] + ends["survived"]))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
