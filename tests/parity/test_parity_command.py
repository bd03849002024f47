"""`multibn parity` as a user runs it, on one and two ranks and a few cases."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multibn import SingleProcess, cli
from multibn.parity import command, worker
from multibn.parity import launch as _launch
from multibn.parity.cases import BOUNDS
from tests.helpers import launch, require

NEEDS = "torch chainer"

pytestmark = pytest.mark.launches
NAMES = ["uneven", "empty-rank", "mean-1e4", "recompute"]


def _parity(*options: str) -> list[str]:
    """The lines of the table that the command prints, and the counts of verdicts."""
    command = [launch.python(), "-m", "multibn", "parity", *options]
    ran = _launch.run(command, timeout=280, variables=launch.VARIABLES)
    assert ran.returncode == 0, ran.stdout
    return [line for line in ran.stdout.splitlines() if line.endswith(" ok")]


_EVERY = pytest.mark.beside(
    partial(_parity, "--ranks", "1", "2", "--cases", *NAMES),
    *("torch", "chainer", "flax", "torchrun", "mpiexec"),
)


@_EVERY
def test_every_combination_is_within_bounds(beside: list[str]) -> None:
    over = ["single process x1"]
    over += [f"{name} x{size}" for name in ("gloo", "mpi", "chainermn naive") for size in (1, 2)]
    assert [line[:27].rstrip() for line in beside] == [
        *(f"{place:19} {adapter}" for place in over for adapter in ("torch", "chainer")),
        f"{'shard_map x2':19} flax",
        f"{2 * len(over) + 1} ok",
    ]


def test_all_quantities_of_the_chosen_cases_are_measured() -> None:
    errors = worker.measure(SingleProcess(), list(worker.ADAPTERS), NAMES)
    for adapter in worker.ADAPTERS:
        own = [error for error in errors if error.adapter == adapter]
        assert list(dict.fromkeys(error.case for error in own)) == NAMES
        assert {error.quantity for error in own} == BOUNDS["float32"].keys()


@pytest.mark.parametrize(
    "function",
    ["helpers.models:pair", "helpers.models:shared_pair", "parity.flax_models:chainer_pair"],
)
def test_a_pair_of_models_is_compared_on_two_ranks(function: str) -> None:
    require.need(*["flax"] * ("flax" in function))
    row, counts = _parity("--model", f"tests.{function}")
    assert row.startswith("gloo x2             models ")
    assert counts == "1 ok"


@pytest.mark.parametrize(
    "model, why",
    [
        ("tests.helpers.models:pear", "AttributeError: module 'tests.helpers.models' has no attr"),
        ("tests.helpers.models", "TypeError: a module cannot be called"),
        ("tests.helpers.models:__doc__", "TypeError: a str cannot be called"),
        ("./m:pair", "ValueError: invalid format: './m:pair'"),
        ("tests.helpers.moddels:pair", "ModuleNotFoundError: No module named 'tests.helpers.modd"),
        (":pair", "ValueError: invalid format: ':pair'"),
        ("exits:pair", "SystemExit: 0"),
        ("divides:pair", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_misspelt_pair_is_an_error_before_any_launch(
    model: str, why: str, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "run_workers", None)
    for name, text in (("exits", "raise SystemExit(0)"), ("divides", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["parity", "--model", model]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(
        "multibn parity: --model must be MODULE:FUNCTION, importable from this f"
    )
    assert f": got {model!r} ({why}" in said.err
