"""The parity command's parts: cases, oracle, comparison, table, JSON, plot, exit status."""

import dataclasses
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import reference, require

require.need("cli")

from multibn import SingleProcess, cli  # noqa: E402
from multibn._launch import WorkerError, Written  # noqa: E402
from multibn.parity import (  # noqa: E402
    cases,
    command,
    compare,
    model,
    oracle,
    report,
    worker,
)
from multibn.parity.cases import BOUNDS, CASES, EPS, MOMENTUM, Case  # noqa: E402
from multibn.parity.compare import Row  # noqa: E402
from multibn.parity.job import Job  # noqa: E402

UNEVEN = next(case for case in CASES if case.name == "uneven")


def test_names_of_cases_are_unique_and_their_bounds_are_of_known_quantities() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert not set(case.bounds) - set(BOUNDS[case.dtype])


def test_cases_are_selected_by_patterns() -> None:
    assert cases.select("*") == CASES
    assert [case.name for case in cases.select("mean-1e4,mean-100")] == ["mean-100", "mean-1e4"]
    with pytest.raises(
        ValueError, match=r"must match the name of a case: got 'nothing'\. Run multibn"
    ):
        cases.select("nothing")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches(case: Case) -> None:
    for size in (1, 4):
        xs, dys, _ = case.batches(size, step=0)
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


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle_agrees_with_the_tests_own(case: Case, size: int) -> None:
    """The two were written apart from each other: closed formula here, chain rule there."""
    got = oracle.train(case, size)
    running = [(np.zeros(5), np.ones(5))] * size

    def check(rank: int, name: str, expected: Any) -> None:
        error = reference.relative_error(got[rank][name], expected)
        assert error < 1e-10, (rank, name, error)

    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        want = reference.batch_norm(
            [x.reshape(len(x), 5, -1) for x in xs] if xs[0].ndim == 2 else xs,
            [dy.reshape(len(dy), 5, -1) for dy in dys] if xs[0].ndim == 2 else dys,
            *case.parameters(),
            eps=EPS,
            weighting=case.weighting,
            masks=None if case.padding is None else masks,
        )
        momentum = 1 / (step + 1) if case.cumulative else MOMENTUM
        for rank, x in enumerate(xs):
            n = {
                "unbiased_global": want.count,
                "unbiased_local": masks[rank].sum(),
                "biased": 0,
            }
            count = n[case.running_var]
            factor = count / (count - 1) if count else 1.0
            running[rank] = reference.running(running[rank], want.mean, want.var, factor, momentum)
            check(rank, f"{step}/y", want.y[rank].reshape(x.shape))
            check(rank, f"{step}/dx", want.dx[rank].reshape(x.shape))
            check(rank, f"{step}/dweight", want.dweight / size)
            check(rank, f"{step}/dbias", want.dbias / size)
            check(rank, f"{step}/running_mean", running[rank][0])
            check(rank, f"{step}/running_var", running[rank][1])


def written(surface: str, case: Case, spoil: str = "", by: float = 0.0) -> list[Written]:
    """What a single process writes; `spoil` names a quantity that is made wrong."""
    arrays, notes = worker.train(surface, case, SingleProcess())
    key = f"{surface}/single process/{case.name}"
    return [
        Written(
            {
                f"{key}/{name}": array + (by if name.endswith(f"/{spoil}") else 0)
                for name, array in arrays.items()
            },
            {key: notes},
        )
    ]


def rows_of(*surfaces: str) -> list[Row]:
    require.need(*surfaces)
    return [Row(surface, "single process", 1) for surface in surfaces]


def test_surfaces_are_within_bounds() -> None:
    rows = rows_of("torch", "chainer")
    for case in CASES:
        compare.compare(rows, [written(row.surface, case) for row in rows], case)
    assert not any(row.broken for row in rows), report.details(rows)
    assert compare.exit_status(rows) == 0
    assert report.details(rows) == []
    assert (
        report.summary(rows)
        == f"2 of 2 combinations are within bounds, in {len(CASES)} cases each."
    )


@pytest.mark.parametrize("quantity", list(BOUNDS["float32"]))
@pytest.mark.parametrize("by", [1e-3, np.nan])
def test_a_broken_surface_is_found(quantity: str, by: float) -> None:
    rows = rows_of("torch", "chainer")
    results = [written("torch", UNEVEN), written("chainer", UNEVEN, quantity, by)]
    compare.compare(rows, results, UNEVEN)
    name, worst = rows[1].worst()
    assert (name, worst.quantity) == ("uneven", quantity)
    assert rows[1].broken
    # Against each other, both are off.
    assert all(row.worst("difference")[1].quantity == quantity for row in rows)
    assert compare.exit_status(rows) == 1
    assert report.verdict(rows[1]) == "BROKEN"
    assert any(f"in {quantity}" in line for line in report.details(rows))


def test_a_peer_that_is_off_does_not_change_the_exit_status() -> None:
    ours, peer = rows_of("torch", "chainer")
    peer.peer = True
    compare.compare(
        [ours, peer], [written("torch", UNEVEN), written("chainer", UNEVEN, "y", 1)], UNEVEN
    )
    assert peer.broken
    assert report.verdict(peer) == "off"
    assert compare.exit_status([ours, peer]) == 0
    assert ours.outcomes["uneven"].differences == {}


def test_one_message_too_many_is_found() -> None:
    (row,) = rows_of("torch")
    results = written("torch", UNEVEN)
    (notes,) = results[0].notes.values()
    notes["messages"][1] = [12, 12, 10]
    compare.compare([row], [results], UNEVEN)
    assert compare.exit_status([row]) == 1
    assert "sends [[], [12, 12, 10]" in report.details([row])[0]


def test_exit_status_without_results() -> None:
    missing = Row("chainer", "mpi", 2, not_run="no mpiexec on PATH")
    failed = Row("chainer", "mpi", 2, not_run="ValueError: no", failed=True)
    fine = Row("torch", "gloo", 2)
    assert compare.exit_status([missing]) == 2
    assert compare.exit_status([missing, fine]) == 0
    assert compare.exit_status([failed, fine]) == 2
    assert report.details([missing]) == ["chainer, mpi, ranks 2: not run: no mpiexec on PATH"]
    assert report.summary([missing, failed]).endswith("1 failed; 1 could not be run here.")


def test_what_cannot_run_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: name != "chainer")
    monkeypatch.setattr(command, "find_command", lambda name: None)
    monkeypatch.setattr(command, "ask", lambda code: False)
    reasons = {
        (row.surface, row.communicator): row.not_run for row in command.plan([1, 2], peers=True)
    }
    assert reasons["torch", "gloo"] == reasons["torch", "single process"] == ""
    assert reasons["torch", "mpi"] == "no mpiexec on PATH"
    assert reasons["torch", "chainermn naive"] == "chainer is not installed; no mpiexec on PATH"
    assert reasons["chainer", "gloo"] == "chainer is not installed"
    assert reasons["nn.SyncBatchNorm", "gloo"] == "no GPU"


def test_nothing_can_run(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: False)
    for arguments in (["--ranks", "1"], ["--model", f"{__name__}:test_nothing_can_run"]):
        assert cli.main(["parity", *arguments]) == 2
        assert "0 of 0 combinations are within bounds" in capsys.readouterr().out


def test_a_shape_that_differs_is_an_infinite_error() -> None:
    assert compare.relative_error(np.ones(3), np.ones(4), np.ones(4)) == np.inf
    assert compare.relative_error(np.ones((0, 3)), np.ones((0, 3)), np.ones((0, 3))) == 0


def test_json_table_and_plot(tmp_path: Path) -> None:
    from multibn.parity import plot

    rows = rows_of("torch", "chainer")
    for case in cases.select("float32,uneven"):
        results = [written("torch", case), written("chainer", case, "y", np.nan)]
        compare.compare(rows, results, case)
        for row, result in zip(rows, results, strict=True):
            compare.time_steps(row, result)
    rows.append(Row("nn.SyncBatchNorm", "gloo", 2, peer=True, not_run="no GPU"))
    report.show(rows)

    report.write_json(rows, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["exit_status"] == 1
    assert document["rows"][1]["cases"]["uneven"]["errors"]["y"] is None
    assert document["rows"][0]["cases"]["uneven"]["errors"]["y"] < 2e-6
    assert document["rows"][0]["us_per_step"] > 0
    assert document["rows"][2]["not_run"] == "no GPU"

    plot.write(rows, tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert 600 < width < 4000
    assert 300 < height < 4000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.png"]


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail_half_way() -> None:
        with report.replacing(path) as temporary:
            temporary.write_text("new")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_workers_that_fail_or_hang_are_errors() -> None:
    job = Job("", 1, ("single process",), ("no such surface",), ("float32",))
    with pytest.raises(WorkerError, match=r"exit status 1, and 0 of 1 ranks") as raised:
        job.run(timeout=60)
    assert raised.value.reason == "KeyError: 'no such surface'"
    with pytest.raises(WorkerError, match=r"no result within 0.02 s. Pass a larger --timeout"):
        dataclasses.replace(job, surfaces=("torch",)).run(timeout=0.02)


def raising() -> None:
    raise OSError("no weights")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("tests.unit.test_parity", "`--model` must name a function of .* got ''"),
        ("tests.unit.test_parity:nothing", "must name a function of .* got 'nothing'"),
        ("tests.unit.test_parity:raising",
         "raised OSError: no weights. To see where, .*; tests.unit.test_parity.raising()"),
    ],
)  # fmt: skip
def test_functions_that_return_nothing(spec: str, message: str) -> None:
    require.need("torch", "chainer")
    assert re.search(message, model.why_not(spec))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, c, x: (t, c), "must return a torch model, .*: got TorchModel, ChainerModel."),
        (lambda t, c, x: (c, t, x), "got ChainerModel, TorchModel, ndarray."),
        (lambda t, c, x: (t, c, x[:1]), "2 or more samples: got float32 of shape"),
        (lambda t, c, x: (t, c, x.astype(int)), "samples: got int64 of shape"),
        (lambda t, c, x: (t.double(), c, x), "dtype .*, float32: got float64 in the torch model"),
        (
            lambda t, c, x: (t.double(), c, x.astype(float)),
            "float64: got float32 in the Chainer model",
        ),
    ],
)
def test_models_that_do_not_fit(change: Any, message: str, monkeypatch: Any) -> None:
    require.need("torch", "chainer")
    from tests.helpers.models import pair

    monkeypatch.setitem(globals(), "pair", lambda: change(*pair()))
    assert re.search(message, model.why_not("tests.unit.test_parity:pair"))


def test_settings_that_differ_are_said() -> None:
    torch_model, chainer_model, _ = model.load("tests.helpers.models:pair")
    assert model.differing_settings(torch_model, chainer_model) == []
    torch_model.bn.eps = 1e-3
    (note,) = model.differing_settings(torch_model, chainer_model)
    assert "eps of batch normalization should be equal: torch has [0.001]" in note


def test_outputs_must_have_an_entry_per_sample() -> None:
    with pytest.raises(TypeError, match=r"one array with an entry per sample: got \(\)"):
        model._output_gradient(np.zeros(()), np.zeros((4, 3)), SingleProcess())
    with pytest.raises(TypeError, match="one array with an entry per sample: got tuple"):
        model._torch_step(_Tuples(), np.zeros((4, 3), "f"), SingleProcess())


class _Tuples:
    def train(self) -> Any:
        return lambda x: (x, x)
