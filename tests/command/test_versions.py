"""What is declared is what is tested: pyproject.toml, noxfile.py and the workflow agree."""

import importlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests import versions
from tests.helpers import require

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
SETS = dict(re.findall(r'"(\w+)": \("(3\.\d+)"', (ROOT / "noxfile.py").read_text()))


def test_the_declared_pythons_are_tested() -> None:
    tested = set(SETS.values())
    assert tested == set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT))
    assert re.findall(r'requires-python = ">=(.*)"', PROJECT) == [min(tested, key=versions.numbers)]


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0", "2.10.0a0+git1", "2.10.0", "3.0.0"])
def test_an_older_torch_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require.need("torch")
    import torch

    from multibn.torch_backend import _least_torch

    (least,) = re.findall(r'^torch = \["torch>=(.*)"\]', PROJECT, re.MULTILINE)
    monkeypatch.setattr(torch, "__version__", version)
    if version.startswith((least, "3")):
        importlib.reload(_least_torch)
        return
    message = rf"needs torch {least} or later: torch {re.escape(version)} is installed\. Run pip"
    with pytest.raises(ImportError, match=message):
        importlib.reload(_least_torch)


def test_the_wheel_names_what_users_install_and_nothing_else() -> None:
    parts = (
        PROJECT.partition(f"[{table}]")[2].partition("\n[")[0]
        for table in ("project.optional-dependencies", "dependency-groups")
    )
    extras, groups = ({*re.findall(r"^([\w-]+) = ", part, re.M)} for part in parts)
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), ROOT / "README.md"]
    told = re.findall(r"'\.\[([\w,]+)\]'", "".join(page.read_text() for page in pages))
    assert {name for names in told for name in names.split(",")} <= extras
    tools = (ROOT / "Makefile").read_text() + (ROOT / "noxfile.py").read_text()
    names = "ray", "mpich", "ipyparallel"
    tools = "".join(tools.replace("clusters-$*", f"clusters-{name}") for name in names)
    assert {*re.findall(r'--group[", ]+([\w-]+)', tools)} == groups
    assert (
        len(re.findall(r"--upgrade[', \"]+pip>=25.1", tools)) == len(names) * 4
    )  # wherever a group goes


def test_the_workflow_runs_each_set() -> None:
    assert dict(re.findall(r'{set: (\w+), python: "(.*)"}', WORKFLOW)) == SETS
    assert "secrets" not in WORKFLOW


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
