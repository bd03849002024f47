"""What is declared is what is tested: pyproject.toml, noxfile.py and the workflow agree."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.versions import report

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
SETS = dict(re.findall(r'"(\w+)": \("(3\.\d+)"', (ROOT / "noxfile.py").read_text()))


def test_the_declared_pythons_are_tested() -> None:
    tested = set(SETS.values())
    assert tested == set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT))
    assert re.findall(r'requires-python = ">=(.*)"', PROJECT) == [min(tested, key=report.numbers)]


def test_the_workflow_runs_each_set() -> None:
    assert dict(re.findall(r'{set: (\w+), python: "(.*)"}', WORKFLOW)) == SETS
    assert "secrets" not in WORKFLOW


def test_the_table_has_the_counts_of_each_run(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure message="assert 1&#10;more"/></testcase>'
        '<testcase classname="" name="d"><error message="no module"/></testcase>'
        '<testcase classname="a" name="e"><skipped message="no GPU"/></testcase>'
        "</testsuite></testsuites>"
    )
    outcome = report.outcome(junit)
    said = ["failed: `.d`: no module", "failed: `a.c`: assert 1", "skipped: no GPU"]
    counts = {"passed": 1, "failed": 2, "skipped": 1}
    assert outcome == {**counts, "reasons": [(text, 1) for text in said]}
    versions = {"Python": "3.13.0"} | dict.fromkeys(report.PACKAGES, "-") | {"torch": "2.15.0"}
    run = {"name": "newest", "date": "2026-11-22", "commit": "0b3e8a9"}
    row = run | {"versions": versions, "outcome": outcome}
    older = row | {"name": "older", "versions": versions | {"torch": "2.6.0+cpu"}}
    page = report.text([row, older])
    line = "| newest | 3.13.0 | 2.15.0 | - | - | - | - | 1 | 2 | 1 | 2026-11-22 | 0b3e8a9 |"
    assert line in page
    assert page.index("| older |") < page.index(line)
    assert "- newest: 1 skipped: no GPU" in page


def test_the_sdist_has_every_file(tmp_path: Path) -> None:
    """What git knows, in a copy, so that no build writes into the tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    files = listed.stdout.strip("\0").split("\0")
    for file in files:
        target = tmp_path / "tree" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / file)
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build],
        cwd=tmp_path / "tree",
        check=True,
        capture_output=True,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert sorted(set(files) - packed) == []
