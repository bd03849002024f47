"""`multibn parity` as a user runs it, on one and two ranks and a few cases."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multibn import _launch, cli
from multibn.parity.cases import BOUNDS
from tests.helpers import launch, require

pytestmark = pytest.mark.launches
CASES = ["uneven", "empty-rank", "mean-1e4", "recompute"]


def _parity(*options: str) -> list[dict[str, Any]]:
    """The rows that the command writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out.json")
        command = [launch.python(), "-m", "multibn", "parity", *options, "--json", str(path)]
        ran = _launch.run(command, timeout=280, variables=launch.VARIABLES)
        assert path.exists(), ran.stdout
        document = json.loads(path.read_text())
    assert ran.returncode == document["exit_status"] == 0, document
    found: list[dict[str, Any]] = document["rows"]
    return found


_EVERY = pytest.mark.beside(
    partial(_parity, "--ranks", "1", "2", "--cases", *CASES),
    *("torch", "chainer", "torchrun", "mpiexec"),
)


@_EVERY
def test_every_combination_is_within_bounds(beside: list[dict[str, Any]]) -> None:
    over = [("single process", 1)]
    over += [(name, size) for name in ("gloo", "mpi", "chainermn naive") for size in (1, 2)]
    assert {(row["surface"], row["communicator"], row["size"]) for row in beside} == {
        (surface, *place) for surface in ("torch", "chainer") for place in over
    }
    for row in beside:
        assert row["verdict"] == "ok", row
        assert list(dict.fromkeys(error["case"] for error in row["errors"])) == CASES
        assert {error["quantity"] for error in row["errors"]} == BOUNDS["float32"].keys()


def test_a_pair_of_models_is_compared_alone_and_on_two_ranks() -> None:
    require.need("torch", "chainer")
    (row,) = _parity("--model", "tests.helpers.models:pair")
    assert (row["communicator"], row["size"], row["verdict"]) == ("gloo", 2, "ok")
    assert {error["case"] for error in row["errors"]} == {
        "torch and chainer alone",
        "torch and chainer on ranks",
        "torch alone and on ranks",
        "chainer alone and on ranks",
    }


def test_a_misspelt_pair_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    require.need("torch", "chainer")
    assert cli.main(["parity", "--model", "tests.helpers.models:pear"]) == 2
    said = capsys.readouterr()
    error = "AttributeError: module 'tests.helpers.models' has no attribute 'pear'"
    assert error in said.err
    assert f"failed: {error}" in said.out
