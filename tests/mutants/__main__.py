"""python -m tests.mutants NUMBER SEED: makes deliberate mistakes, and prints those unseen by tests.

Each is made in a copy, and meets tests that run its line, then checks on ranks, until one fails.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, zip_longest
from pathlib import Path

import coverage

from multibn import _launch
from tests.helpers.launch import ROOT
from tests.mutants.candidates import Mutant, draw, room

GOAL = 0.97  # killed of killed and survived
SECONDS = 30.0, 100.0  # of tests that a mutant meets at first, and in all
CHECKS, LAUNCHES = 60.0, 4  # on ranks, at most
FEW = 20  # tests that run a line; those of a cached function may all read what one has computed
LIMIT = 900.0  # seconds for a run of pytest, on a busy machine
# A process in which Triton reads at its import that it interprets.
INTERPRETED = ["-m", "pytest", "-x", "-q"]
INTERPRETED += [
    f"tests/kernels/{kind}_{of}.py" for of in ("steps", "passes") for kind in ("test", "triton")
]
ENDS = ["killed", "survived", "never run", "equivalent", "not built"]


def _run(tree: Path, *arguments: str, limit: float = LIMIT, **variables: str) -> tuple[int, str]:
    """Run Python in a tree: its exit status, or -1 after the limit, and what is printed."""
    command = ["env", "-C", str(tree), sys.executable, *arguments]
    try:
        ran = _launch.run(command, timeout=limit, variables={"PYTHONPATH": str(tree), **variables})
    except subprocess.TimeoutExpired as expired:
        return -1, str(expired.output)
    return ran.returncode, ran.stdout


def _pytest(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    Path(tree, "tests.txt").write_text("\n".join(sorted(tests)))
    options = ["-p", "tests.mutants.recorder", "-o", "timeout=120"]
    return _run(tree, "-m", "pytest", "-x", "-q", *options, "@tests.txt")


def _built(tree: Path) -> bool:
    built = [*tree.glob("multibn/**/*.so")]
    for path in built:
        path.unlink()
    _run(tree, "setup.py", "-q", "build_ext", "--inplace")
    return all(path.exists() for path in built)


class Tests:
    """The tests of a tree by their contexts: ids of pytest, or launcher, size, module:check."""

    def __init__(self, base: Path, record: str) -> None:
        self._base = base
        options = ["-q", "-p", "tests.mutants.recorder", "--continue-on-collection-errors"]
        ran = _run(base, "-m", "pytest", *options, limit=10 * LIMIT, MULTIBN_RECORD=record)
        print(ran[1][-500:])
        lines = coverage.Coverage(f"{record}/lines", config_file=False)
        lines.combine()
        self._lines = lines.get_data()
        tests = json.loads(Path(record, "tests").read_text())
        self._names = {test: name for test, (name, _) in tests.items()}
        self._seconds = {test: seconds for test, (_, seconds) in tests.items()}
        self.of = functools.cache(self._of)

    def _of(self, path: str) -> dict[int, set[str]]:
        """The tests that run each line of a file; if it is in C, those of files that import it."""
        if path.endswith(".py"):
            found = self._lines.contexts_by_lineno(str(self._base / path))
            return {n: self._names.keys() & found[n] for n in found}
        built = {p.name.split(".")[0] for p in Path(self._base, path).parent.glob("*.so")}
        users = {p for p in self._base.glob("multibn/**/*.py") for b in built if b in p.read_text()}
        of = [self.of(str(python.relative_to(self._base))).values() for python in users]
        # Some call the library itself, and run no line of the file that imports it.
        files = {test.split("::")[0] for test in self._names if "::" in test}
        texts = {file: Path(self._base, file).read_text() for file in files}
        callers = {f for f, text in texts.items() if any(f"{u.stem}.core." in text for u in users)}
        direct = {test for test in self._names if test.split("::")[0] in callers}
        return {0: direct.union(*(tests for values in of for tests in values))}

    def _cheapest(self, tests: Iterable[str], most: float, own: Collection[str]) -> list[str]:
        """Own ones, the cheapest of each file, their next ones: as many as take `most` seconds."""
        files: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda test: (self._seconds[test], test)):
            files.setdefault(test.split(":")[0], []).append(test)
        turns = [test for turn in zip_longest(*files.values()) for test in turn if test]
        turns.sort(key=lambda test: test not in own)
        took = accumulate(self._seconds[test] for test in turns)
        return [test for test, seconds in zip(turns, took, strict=True) if seconds < most]

    def meet(self, mutant: Mutant, source: str) -> tuple[str, str]:
        """How a mutant ends: the test that has failed, or how many have not."""
        if mutant.text(source) in Path(__file__).with_name("equivalent.txt").read_text():
            return "equivalent", ""
        of = self.of(mutant.path)
        tests = set[str]().union(*(of.get(n, ()) for n in mutant.lines or of))
        # Tests of the same room come first; where few tests run the line, these.
        own_room = mutant.path.split("/")[1]
        own = {test for test in tests if test.startswith(f"tests/{own_room}/")}
        if 0 < len(tests) < FEW:
            own, tests = tests, tests.union(*of.values())
        if not tests and own_room != "kernels":
            return "never run", ""
        inside = self._cheapest((test for test in tests if "::" in test), SECONDS[1], own)
        first = self._cheapest(inside, SECONDS[0], own)
        checks = self._cheapest((test for test in tests if "::" not in test), CHECKS, own)
        launches = list(dict.fromkeys(c.rpartition(" ")[0] for c in checks))[:LAUNCHES]
        checks = [check for check in checks if check.rpartition(" ")[0] in launches]
        with tempfile.TemporaryDirectory(prefix="multibn-mutant-") as name:
            tree = shutil.copytree(self._base, Path(name, "tree"))
            Path(tree, mutant.path).write_text(mutant.change(source), "latin-1")
            if not mutant.path.endswith(".py") and not _built(tree):
                return "not built", ""
            for some in filter(None, (first, [t for t in inside if t not in first] + checks)):
                status, text = _pytest(tree, [self._names[test] for test in some])
                if status:
                    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.M)
                    return "killed", failed[1] if failed else f"exit status {status}"
            interpreted = own_room == "kernels" and mutant.path.endswith(".py")
            if interpreted and _run(tree, *INTERPRETED, TRITON_INTERPRET="1")[0]:
                return "killed", "Triton's interpreter"
        return "survived", f"{len(inside)} tests, {len(checks)} checks on ranks"


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
        ends, killers = Counter[tuple[str, str]](), set[str]()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            met = pool.map(lambda mutant: tests.meet(mutant, sources[mutant.path]), mutants)
            for m, (end, why) in zip(mutants, met, strict=True):
                ends[room(m.path), end] += 1
                killers |= {why} if end == "killed" and "::" in why else set()
                where = f"{m.path}:{sources[m.path].count(chr(10), 0, m.start) + 1}"
                print(f"{end}: {where} {why}\n{m.text(sources[m.path])}", end="", flush=True)
        for name in sorted({name for name, _ in ends}):
            print(f"| {name} | " + " | ".join(str(ends[name, end]) for end in ENDS) + " |")
        killed, survived = (sum(n for (_, e), n in ends.items() if e == end) for end in ENDS[:2])
        print(f"seed {seed}: {killed} of {killed + survived} killed; the columns are {ENDS}")
        status, text = _pytest(base, killers) if killers else (0, "")
        print(f"without a mistake, tests that have killed fail:\n{text}" if status else "")
        return int(status != 0 or killed < GOAL * (killed + survived))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
