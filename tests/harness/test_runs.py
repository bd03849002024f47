"""A check that applies to some launches alone is collected for these: no id tests nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.runs import Only, Runs, declared, only
from tests.helpers.launch import ROOT


def _guarded(source: str) -> Iterator[str]:
    """The checks that return at once, or do nothing, on some launches: a condition of all ranks."""
    for check in ast.parse(source).body:
        if not isinstance(check, ast.FunctionDef) or not check.name.startswith("check_"):
            continue
        done = [
            s for s in check.body if not isinstance(s, ast.Import | ast.ImportFrom | ast.Assign)
        ]
        done = done[1:] if ast.get_docstring(check) is not None else done
        for statement in done:
            if not isinstance(statement, ast.If) or "rank" in ast.unparse(statement.test):
                continue
            ends = isinstance(statement.body[0], ast.Return) and statement.body[0].value is None
            if ends or (len(done) == 1 and not statement.orelse):
                yield check.name
                break


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/**/checks_*.py")), ids=lambda p: p.stem)
def test_no_check_returns_at_once(path: Path) -> None:
    assert [*_guarded(path.read_text())] == [], "take @only(...), which is read when collected"


@pytest.mark.parametrize(
    "body",
    [
        "if world.size != 2: return\n    work()",
        "work()\n    if not isinstance(world, TorchDistributed): return\n    more()",
        "import torch\n    if _under_torchrun(world): work()",
        "'''Its promise.'''\n    x = 3\n    if world.size > 1:\n        work(x)",
    ],
)
def test_a_check_that_returns_at_once_is_found(body: str) -> None:
    assert [*_guarded(f"def check_it(world):\n    {body}\n")] == ["check_it"]


@pytest.mark.parametrize(
    "body",
    ["if world.rank == 0: return\n    work()", "if world.size == 1: one()\n    else: many()"],
)
def test_a_check_whose_ranks_do_different_things_is_fine(body: str) -> None:
    assert not [*_guarded(f"def check_it(world):\n    {body}\n")]


def test_only_says_to_which_launches_a_check_applies() -> None:
    @only("torchrun", sizes=(2, 3), needs=("chainer",))
    def check_it(world: object) -> None:
        pass

    its = check_it.__dict__["only"]
    launches = [(launcher, n) for launcher in ("torchrun", "mpiexec") for n in range(1, 5)]
    assert [each for each in launches if its.applies(*each)] == [("torchrun", 2), ("torchrun", 3)]
    assert its.needs == ("chainer",)
    assert all(Only().applies(*each) for each in launches)


def test_a_file_says_its_launches_in_a_line_that_is_read_without_an_import() -> None:
    assert declared('import gone\nRUNS = on("torchrun", 1, 2, needs="torch dev")\n') == Runs(
        ["torchrun"], (1, 2), ["torch", "dev"]
    )
    with pytest.raises(ValueError, match="a file of checks must say its launches: RUNS = on"):
        declared("def check_it(world): ...")
