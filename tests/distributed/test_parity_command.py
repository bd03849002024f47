"""`multibn parity` as a user runs it, on one and two ranks and a few cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from multibn import cli
from multibn.parity import model
from tests.helpers import require

require.need("cli")
CASES = ["uneven", "empty-rank", "mean-1e4", "recompute"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    require.need("cli", "torch", "chainer", "torchrun", "mpiexec")
    path: Path = tmp_path_factory.mktemp("parity") / "out.json"
    status = cli.main(
        ["parity", "--ranks", "1,2", "--cases", ",".join(CASES), "--peers", "--json", str(path)]
    )
    document = json.loads(path.read_text())
    assert status == document["exit_status"] == 0, document
    found: list[dict[str, Any]] = document["rows"]
    return found


def test_every_combination_is_within_bounds(rows: list[dict[str, Any]]) -> None:
    ours = [row for row in rows if not row["peer"]]
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


def test_weak_spots_of_chainermn_show(rows: list[dict[str, Any]]) -> None:
    (row,) = [r for r in rows if r["surface"] == "ChainerMN's link" and r["ranks"] == 2]
    errors = {name: case["errors"] for name, case in row["cases"].items()}
    assert errors["uneven"]["y"] > 1e-3
    assert errors["mean-1e4"]["y"] is None  # NaN
    assert "ZeroDivisionError" in row["cases"]["empty-rank"]["crash"]
    # F.forget runs the link twice: output and gradient are right, the averages are updated twice.
    assert errors["recompute"]["y"] < 2e-6
    assert errors["recompute"]["running_mean"] > 0.1


def test_a_pair_of_models(tmp_path: Path) -> None:
    require.need("cli", "torch", "chainer", "mpiexec")
    path = tmp_path / "out.json"
    assert cli.main(["parity", "--model", "tests.helpers.models:pair", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
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
