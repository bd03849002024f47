"""Launchers with an environment of their own: Ray Train, MPICH, ipyparallel. `make clusters`."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.helpers import launch, require
from tests.helpers.pages import commands, programs

pytestmark = [pytest.mark.launches, pytest.mark.timeout(600)]
GUIDE = "docs/guides/multi-node.md"
LOSSES = commands("README.md")[0].printed


def _python(name: str) -> Path:
    require.need(name)
    return launch.ROOT / f".venv/{name}/bin/python"


def _run(folder: Path, *command: object) -> str:
    variables = os.environ | launch.VARIABLES | {"PYTHONPATH": str(launch.ROOT)}
    ran = launch.captured(*map(str, command), cwd=folder, env=variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_ray_train_prints_the_losses(tmp_path: Path) -> None:
    python = _python("ray")
    (tmp_path / "train_ray.py").write_text(programs(GUIDE)["train_ray.py"])
    printed = _run(tmp_path, python, "train_ray.py")
    losses = " ".join(line.rpartition(" ")[2] for line in LOSSES)
    shown = set(re.findall(r"losses of rank (.*)", printed))  # Ray repeats what workers print
    assert shown == {f"{rank}: {losses}" for rank in range(2)}, printed


def test_mpich_prints_the_losses(tmp_path: Path) -> None:
    python = _python("mpich")
    (tmp_path / "train_mpi.py").write_text(programs(GUIDE)["train_mpi.py"])
    launcher = python.parent / "mpiexec"
    assert "MPICH" in _run(
        tmp_path, python, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    printed = _run(tmp_path, launcher, "-n", 2, python, "-m", "mpi4py", "train_mpi.py")
    assert re.findall(r"^step \d: loss .*$", printed, re.MULTILINE) == LOSSES


def test_cells_of_ipyparallel_go_on_after_an_error(tmp_path: Path) -> None:
    python = _python("ipyparallel")
    (tmp_path / "cells.py").write_text(programs(GUIDE)["cells.py"])
    error, means = _run(tmp_path, python, "cells.py").splitlines()[-2:]
    assert re.search(r"FloatingPointError: .* not finite: .* on rank\(s\) \[1\] of 2", error)
    left, right = json.loads(means)
    assert left == right
