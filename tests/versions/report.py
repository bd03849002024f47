"""The table of all sets, as docs/versions.md."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.tables import markdown

PACKAGES = {
    "torch": ["torch"],
    "Triton": ["triton"],
    "NumPy": ["numpy"],
    "CuPy": ["cupy-cuda12x", "cupy-cuda13x"],
    "Chainer": ["chainer"],
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
        kind, reason = _judge(case)
        counts[kind] += 1
        if reason:
            reasons[f"{kind}: {reason}"] += 1
    return counts | {"reasons": sorted(reasons.items())}


def _judge(case: ElementTree.Element) -> tuple[str, str]:
    for tag in ("failure", "error"):
        if (part := case.find(tag)) is not None:
            name = f"{case.get('classname')}.{case.get('name')}"  # with <lambda>, for instance
            return "failed", f"`{name}`: {_first_line(part)}"
    if (part := case.find("skipped")) is not None:
        return "skipped", _first_line(part)
    return "passed", ""


def _first_line(part: ElementTree.Element) -> str:
    return part.get("message", "").split("\n")[0]


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """docs/versions.md, the oldest torch first."""
    ordered = sorted(rows, key=lambda row: numbers(row["versions"]["torch"]))
    reasons = [
        f"- {row['name']}: {number} {reason}"
        for row in ordered
        for reason, number in row["outcome"]["reasons"]
    ]
    counts = {name: sum(row["outcome"][name] for row in ordered) for name in COUNTS}
    table = markdown(COLUMNS, map(_line, ordered))
    return _PAGE.format(table=table, reasons="\n".join(reasons), sets=len(ordered), **counts)


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _line(row: Mapping[str, Any]) -> Sequence[str]:
    counts = (str(row["outcome"][count]) for count in COUNTS)
    return (row["name"], *row["versions"].values(), *counts, row["date"], row["commit"])


# Lines as long as those of the other pages.
# ruff: noqa: E501
_PAGE = """\
# Versions

{passed:,} tests passed and {failed:,} failed, with {sets} sets of versions.

Written by `make versions`, which runs the tests that need no launcher (warnings as errors) in
an environment for each set of versions, on a machine without a GPU.

{table}

- minimum: the lowest versions that `pyproject.toml` admits, of multibn's own dependencies and of its extras `torch`,
  `chainer`, `mpi` and `cli`
- gpu: the packages of a machine with an NVIDIA GPU in 2026; CuPy can be imported there, and Triton's interpreter runs the kernels
- pin: what `make` installs for `make test`, which also runs the tests on ranks
- newest: whatever pip installs today

Failed and skipped tests, with their numbers:

{reasons}

## Tried by hand, and not declared

In November 2026, with Python 3.11 but for the last row. A row is declared once `make versions` has run all of its tests.

| torch | tests | passed | failed |
| --- | --- | --- | --- |
| 2.4.1 | - | - | `import multibn.torch_backend`: torch has no `CheckpointPolicy` |
| 2.5.1 | layers, conversion, training, kernels, without torch.compile | 1015 | 120: 97 for `torch.compiler.set_stance`, which came with 2.6 |
| 2.6.0 | layers, conversion, training, without torch.compile | 594 | 1: `step_statistics` in compiled code; of compiled code and torch.func, many |
| 2.9.1 | layers and conversion | 559 | 3: a compiled model of SubBatchNorm, the words of an error of torch.export, a time limit |
| 2.15.0, Python 3.14.8, Chainer 7.8.1 | all without a launcher | 3203 | 63: 59 by a warning of torch.jit that the tests now ignore; of the 63, 61 pass when run again, two were not |

The C core serves tensors from 2.10 on, as `multibn info` says. pip refuses torch before 2.10,
unless it is told `--no-deps`.
"""
