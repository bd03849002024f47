"""`multibn parity` as a user runs it, on one and two ranks and a few cases."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multibn import _launch, cli
from multibn.parity import model
from tests.helpers import launch, require

require.need("cli")
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
    partial(_parity, "--ranks", "1,2", "--cases", ",".join(CASES), "--peers"),
    *("cli", "torch", "chainer", "torchrun", "mpiexec"),
)


@_EVERY
def test_every_combination_is_within_bounds(beside: list[dict[str, Any]]) -> None:
    ours = [row for row in beside if not row["peer"]]
    over = [("single process", 1)]
    over += [(name, size) for name in ("gloo", "mpi", "chainermn naive") for size in (1, 2)]
    assert {(row["surface"], row["communicator"], row["ranks"]) for row in ours} == {
        (surface, *place) for surface in ("torch", "chainer") for place in over
    }
    for row in ours:
        assert row["verdict"] == "ok", row
        assert list(row["cases"]) == CASES
        assert row["us_per_step"] > 0
        for case in row["cases"].values():
            assert case["errors"].keys() == case["differences"].keys() == case["bounds"].keys()
            assert not case["unexpected_messages"]


@_EVERY
def test_weak_spots_of_chainermn_show(beside: list[dict[str, Any]]) -> None:
    (row,) = [r for r in beside if r["surface"] == "ChainerMN's link" and r["ranks"] == 2]
    errors = {name: case["errors"] for name, case in row["cases"].items()}
    assert errors["uneven"]["y"] > 1e-3
    assert errors["mean-1e4"]["y"] is None  # NaN
    assert "ZeroDivisionError" in row["cases"]["empty-rank"]["crash"]
    # F.forget runs the link twice: output and gradient are right, the averages are updated twice.
    assert errors["recompute"]["y"] < 2e-6
    assert errors["recompute"]["running_mean"] > 0.1


def test_a_pair_of_models() -> None:
    require.need("cli", "torch", "chainer", "mpiexec")
    rows = _parity("--model", "tests.helpers.models:pair")
    assert [(row["surface"], row["ranks"], list(row["cases"])) for row in rows] == [
        ("torch, chainer", 1, ["each other"]),
        ("torch, chainer", 2, ["each other"]),
        ("torch", 2, ["one process"]),
        ("chainer", 2, ["one process"]),
    ]


def test_a_misspelt_pair_is_refused_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require.need("cli", "torch", "chainer")
    monkeypatch.setattr(model, "run", None)
    assert cli.main(["parity", "--model", "tests.helpers.models:pear"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "function of tests.helpers.models: got 'pear', the nearest is 'pair'. W" in said.err
