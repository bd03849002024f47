"""The parity command's parts: cases, oracle, comparison, table, JSON, exit status."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess, _launch, cli
from multibn._launch import WorkerError, Written
from multibn.parity import cases, command, compare, model, oracle, worker
from multibn.parity.cases import BOUNDS, CASES, Case
from multibn.parity.compare import Row
from tests.helpers import launch, require

UNEVEN = next(case for case in CASES if case.name == "uneven")


def test_cases_are_selected_by_patterns() -> None:
    assert cases.select("*") == CASES
    assert [case.name for case in cases.select("mean-1e4,mean-100")] == ["mean-100", "mean-1e4"]
    with pytest.raises(
        argparse.ArgumentTypeError,
        match=r"must match the name of a case: got 'nothing'\. Run multibn",
    ):
        cases.select("mean-100,nothing")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_fit_their_case_and_are_repeatable(case: Case) -> None:
    for size in (1, 4):
        xs, dys, masks = case.batches(size, step=0)
        assert masks[0][0].all()  # no batch without an element that counts
        for x, dy in zip(xs, dys, strict=True):
            assert x.shape == dy.shape
            assert x.dtype == dy.dtype == np.dtype(case.dtype)
            if case.layout == "channels_last":
                assert np.moveaxis(x, 1, -1).flags.c_contiguous
        assert [len(x) for x in xs].count(0) == (case.split == "empty" and size > 1)
        again, *_ = case.batches(size, step=0)
        other, *_ = case.batches(size, step=1)
        for x, same in zip(xs, again, strict=True):
            np.testing.assert_array_equal(x, same)  # NaN where a mask hides it
        assert not np.array_equal(xs[0], other[0])


def written(surface: str, case: Case, spoil: str = "", by: float = 0.0) -> list[Written]:
    """What a single process writes; `spoil` names a quantity that is made wrong."""
    arrays = worker.train(surface, case, SingleProcess())
    key = f"{surface}/single process/{case.name}"
    return [
        Written(
            {
                f"{key}/{name}": array + (by if name.endswith(f"/{spoil}") else 0)
                for name, array in arrays.items()
            }
        )
    ]


def rows_of(*surfaces: str) -> list[Row]:
    require.need(*surfaces)
    return [Row(surface, "single process", 1) for surface in surfaces]


@pytest.mark.parametrize("quantity", list(BOUNDS["float32"]))
@pytest.mark.parametrize("by", [1e-3, np.nan])
def test_a_broken_surface_is_found(quantity: str, by: float) -> None:
    rows = rows_of("torch", "chainer")
    results = [written("torch", UNEVEN), written("chainer", UNEVEN, quantity, by)]
    for row, result in zip(rows, results, strict=True):
        compare.compare(row, result, UNEVEN)
    assert (rows[1].worst.case, rows[1].worst.quantity) == ("uneven", quantity)
    assert compare.exit_status(rows) == 1
    assert [row.verdict for row in rows] == ["ok", "BROKEN"]


def test_without_results_the_exit_status_is_2() -> None:
    missing = Row("chainer", "mpi", 2, not_run="no mpiexec on PATH")
    failed = Row("chainer", "mpi", 2, not_run="ValueError: no", failed=True)
    fine = Row("torch", "gloo", 2)
    assert compare.exit_status([missing]) == 2
    assert compare.exit_status([missing, fine]) == 0
    assert compare.exit_status([failed, fine]) == 2
    assert command.summary([missing, failed]) == (
        "0 of 0 combinations are within bounds, in 0 case(s) each; 1 failed; 1 could not be run "
        "here."
    )


def test_the_worst_of_each_broken_case_is_named(capsys: Any) -> None:
    row = Row("torch", "mpi", 2)
    for error, quantity in ((2.0, "dx"), (9.0, "y"), (3.0, "eval"), (0.5, "dbias")):
        row.add("uneven", quantity, error, bound=1.0)
    row.add("masked", "y", 1e-3, bound=1e-4)
    command.show([row])
    said = capsys.readouterr().out.splitlines()
    assert said[3:5] == [
        "    uneven: 9e+00 in y, bound 1e+00",
        "    masked: 1e-03 in y, bound 1e-04",
    ]


def test_what_cannot_run_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: name != "chainer")
    monkeypatch.setattr(command, "find_command", lambda name: None)
    reasons = {(row.surface, row.communicator): row.not_run for row in command.plan([1, 2])}
    assert reasons["torch", "gloo"] == reasons["torch", "single process"] == ""
    assert reasons["torch", "mpi"] == "no mpiexec on PATH"
    assert reasons["torch", "chainermn naive"] == "chainer is not installed; no mpiexec on PATH"
    assert reasons["chainer", "gloo"] == "chainer is not installed"


def test_where_nothing_can_run_the_exit_status_is_2(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: False)
    for arguments in (
        ["--ranks", "1"],
        ["--model", f"{__name__}:test_where_nothing_can_run_the_exit_status_is_2"],
    ):
        assert cli.main(["parity", *arguments]) == 2
        assert "0 of 0 combinations are within bounds" in capsys.readouterr().out


def test_a_shape_that_differs_is_an_infinite_error() -> None:
    assert oracle.relative_error(np.ones(3), np.ones(4), np.ones(4)) == np.inf
    assert oracle.relative_error(np.ones((0, 3)), np.ones((0, 3)), np.ones((0, 3))) == 0


def test_the_table_fits_80_columns(capsys: Any) -> None:
    """With the names of the case and of the quantity that failed."""
    case = max((case.name for case in cases.CASES), key=len)
    row = Row("chainer", "chainermn naive", 16)
    row.add(case, "running_mean", np.inf, bound=1e-6)
    command.show([row, Row("torch", "single process", 1, not_run="torch is not installed")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:5])) <= 80
    (failed,) = [line for line in lines if line.split()[:3] == ["chainermn", "naive", "16"]]
    assert failed.split()[-4:] == ["inf", "running_mean,", case, "BROKEN"]


def test_a_case_of_recomputation_runs_each_step_again(monkeypatch: Any) -> None:
    """In Chainer, `helpers.parity` finds one message more."""
    require.need("torch")
    from multibn.engine.recompute import replaying

    again: list[Any] = []
    following = replaying.next

    def noted(self: replaying, shape: Any) -> Any:
        again.append(shape)
        return following(self, shape)

    monkeypatch.setattr(replaying, "next", noted)
    for name, count in (("float32", 0), ("recompute", 3)):
        (case,) = cases.select(name)
        worker.train("torch", case, SingleProcess())
        assert len(again) == count


def test_json_and_the_table_hold_every_row(tmp_path: Path, capsys: Any) -> None:
    rows = rows_of("torch", "chainer")
    for case in cases.select("float32,uneven"):
        results = [written("torch", case), written("chainer", case, "y", np.nan)]
        for row, result in zip(rows, results, strict=True):
            compare.compare(row, result, case)
    rows.append(Row("chainer", "mpi", 2, not_run="no mpiexec on PATH"))
    command.show(rows)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    worst = rows[0].worst
    numbers = [f"{worst.error:.0e}", f"{worst.quantity},", worst.case]
    of_torch, of_chainer = said.index(["torch"]), said.index(["chainer"])
    assert of_torch < said.index(["single", "process", "1", *numbers, "ok"]) < of_chainer
    assert of_chainer < said.index(["mpi", "2", "not", "run:", "no", "mpiexec", "on", "PATH"])

    command.write_json(rows, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["exit_status"] == 1
    errors = [
        {(e["case"], e["quantity"]): e["error"] for e in row["errors"]} for row in document["rows"]
    ]
    assert errors[1]["uneven", "y"] is None  # JSON has no NaN
    assert errors[0]["uneven", "y"] < 2e-6
    assert document["rows"][2]["verdict"] == "not run"


def test_workers_that_fail_or_hang_are_errors() -> None:
    start = partial(command.launch, 1, ["single process"], cases=["float32"])
    with pytest.raises(WorkerError, match=r"exit status 1, and 0 of 1 ranks") as raised:
        start(60, surfaces=["no such surface"])
    assert raised.value.reason == "KeyError: 'no such surface'"
    with pytest.raises(WorkerError, match=r"no result within 0.02 s. Pass a larger --timeout"):
        start(0.02, surfaces=["torch"])


def test_ranks_find_the_users_modules(monkeypatch: Any) -> None:
    """Those in the working directory, and on the PYTHONPATH of the command."""
    package = str(launch.ROOT)
    monkeypatch.setattr(_launch.os, "getcwd", lambda: "/here")
    monkeypatch.setenv("PYTHONPATH", "/there")
    assert _launch.environment()["PYTHONPATH"] == f"{package}:/here:/there"
    monkeypatch.delenv("PYTHONPATH")
    assert _launch.environment()["PYTHONPATH"] == f"{package}:/here"


def pair(change: Any) -> Any:
    """`change` of a pair that fits, as the function that the user names."""
    from tests.helpers.models import pair

    return lambda: change(*pair())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, c, x: (t, c), "must return a torch model, .*: got TorchModel, ChainerModel."),
        (lambda t, c, x: (c, t, x), "got ChainerModel, TorchModel, ndarray."),
        (lambda t, c, x: 1, "must return a torch model, .*: got int"),
        (lambda t, c, x: (t, c, x[:1]), "2 or more samples: got float32 of shape"),
        (lambda t, c, x: (t, c, x.astype(int)), "samples: got int64 of shape"),
        (
            lambda t, c, x: (torch_module(t, "other"), c, x),
            r"same names: .* Missing key.* \"other\.weight\".* Unexpected key.* Rename or change",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused(change: Any, message: str, monkeypatch: Any) -> None:
    require.need("torch", "chainer")
    monkeypatch.setitem(globals(), "changed", pair(change))
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        model.train(f"{__name__}:changed", SingleProcess())


def torch_module(module: Any, name: str) -> Any:
    """`module` with its batch normalization under another name."""
    module.add_module(name, module.bn)
    del module.bn
    return module


def test_errors_are_relative_to_what_is_right() -> None:
    got, want = ([{"rank 0/dx": np.full(2, v)}] for v in (10.0, 1.0))
    assert compare.largest(got, want) == {"dx": 9.0}
