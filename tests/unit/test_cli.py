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


def test_info_as_json() -> None:
    ran = multibn("info", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["versions"]["multibn"] == __version__
    assert found["communicators"]["single process"] is None
    if require.available("core"):
        assert found["kernels"]["host"].startswith("C core, ")
    if require.available("torch"):
        assert found["torch"]["backends"]["gloo"]
        assert found["communicators"]["torch.distributed, gloo"] is None
    if require.available("mpiexec"):
        assert found["launchers"]["mpiexec"]["version"]
        assert found["mpi"]["cuda_aware"] in (True, False)
        assert found["communicators"]["MPI"] is None


NOTHING: dict[str, Any] = {
    "versions": {"chainer": None},
    "kernels": {"host": "generic"},
    "launchers": {"torchrun": None, "mpiexec": None},
    "torch": None,
    "mpi": None,
    "cupy": None,
    "no_shared_memory": None,
    "gpus": [],
}
TORCH = {"backends": {"gloo": True, "nccl": True, "mpi": False}, "cuda": "12.8", "gpus": 1}
MPI = {"library": "Open MPI", "cuda_aware": False}
LAUNCHERS = {"torchrun": None, "mpiexec": {"path": "/mpiexec", "version": "5"}}


@pytest.mark.parametrize(
    "communicator, here, advice",
    [
        ("torch.distributed, gloo", {}, "pip install 'multibn[torch]'"),
        ("torch.distributed, gloo", {"torch": {"error": "no"}}, "torch cannot be imported: no"),
        ("torch.distributed, gloo", {"torch": TORCH}, None),
        ("torch.distributed, gloo, shared memory", {}, "pip install 'multibn[torch]'"),
        ("torch.distributed, gloo, shared memory", {"torch": TORCH}, None),
        ("torch.distributed, gloo, shared memory", {"torch": TORCH, "no_shared_memory": "none"},
         "none. Ranks of one machine use the network instead"),
        ("torch.distributed, NCCL", {"torch": TORCH}, "needs an NVIDIA GPU"),
        ("torch.distributed, NCCL", {"torch": TORCH, "gpus": ["GPU 0"]}, None),
        ("torch.distributed, NCCL", {"torch": TORCH | {"gpus": 0}, "gpus": ["0"]}, "sees no GPU"),
        ("MPI", {}, "pip install 'multibn[mpi]'"),
        ("MPI", {"mpi": {"error": "no"}}, "mpi4py cannot be imported: no"),
        ("MPI", {"mpi": MPI}, "put mpiexec on PATH"),
        ("MPI", {"mpi": MPI, "launchers": LAUNCHERS}, None),
        ("MPI, GPU memory without copies",
         {"mpi": MPI, "launchers": LAUNCHERS, "gpus": ["0"]}, "an MPI that is CUDA-aware"),
        ("NCCL, by CuPy", {}, "needs an NVIDIA GPU"),
        ("NCCL, by CuPy", {"gpus": ["0"], "cupy": {"error": "no nccl"}}, "work here: no nccl"),
        ("NCCL, by CuPy", {"gpus": ["0"], "cupy": {"gpus": 1}}, None),
        ("ChainerMN, naive",
         {"mpi": MPI, "launchers": LAUNCHERS}, "pip install 'multibn[chainer]'"),
        ("ChainerMN, pure_nccl",
         {"mpi": MPI, "launchers": LAUNCHERS, "versions": {"chainer": "7"}, "gpus": ["0"]},
         "pip install cupy"),
    ],
)  # fmt: skip
def test_info_names_the_one_thing_to_do(
    communicator: str, here: dict[str, Any], advice: str | None
) -> None:
    found = NOTHING | here
    said = info._communicators(found)[communicator]
    assert said is None if advice is None else advice in str(said)
    assert communicator in info.text(found | {"communicators": info._communicators(found)})


def test_usage() -> None:
    ran = multibn("--version")
    assert (ran.returncode, ran.stdout) == (0, f"multibn {__version__}\n")
    assert multibn().returncode == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ranks", "2,x"], "`--ranks` must be positive numbers .* got '2,x'"),
        (["--ranks", "0"], "`--ranks` must be positive numbers .* got '0'"),
        *[
            (["--timeout", wrong], f"`--timeout` must be a positive .* seconds: got '{wrong}'")
            for wrong in ("0", "nan", "inf", "soon")
        ],
        (["--cases", "nothing"], "`--cases` must match the name of a case: got 'nothing'"),
    ],
)
def test_arguments_that_do_not_fit(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["parity", *arguments])
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said


@pytest.mark.parametrize("name", ["rich", "matplotlib"])
def test_what_the_extra_brings_is_named(name: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(cli, "importable", lambda asked: asked != name)
    assert cli.main(["parity", "--plot", "a.png"]) == 2
    error = capsys.readouterr().err
    assert f"{name} must be installed" in error
    assert "pip install 'multibn[cli]'" in error


def test_parity_without_numpy(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(cli, "importable", lambda asked: asked != "numpy")
    assert cli.main(["parity"]) == 2
    assert "numpy must be installed" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_first(tmp_path: Path, capsys: Any) -> None:
    require.need("cli")
    assert cli.main(["parity", "--json", str(tmp_path / "no" / "a.json")]) == 2
    assert "must be a file in a folder that exists" in capsys.readouterr().err


def test_convert(tmp_path: Path, capsys: Any) -> None:
    require.need("torch")
    import torch

    arrays = {"l/W": np.ones((2, 3), "f"), "l/b": np.zeros(2, "f")}
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    assert cli.main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "a.pt")]) == 0
    assert "wrote 2 arrays" in capsys.readouterr().out
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(state) == {"l.weight", "l.bias"}
    assert cli.main(["convert", str(tmp_path / "no.npz"), str(tmp_path / "b.pt")]) == 2
    assert "no.npz" in capsys.readouterr().err


def test_convert_rescales_the_running_variance(tmp_path: Path) -> None:
    require.need("torch")
    import torch

    bn = {"gamma": 1, "beta": 0, "avg_mean": 0, "avg_var": 3}
    arrays = {f"bn/{name}": np.full(2, value, "f") for name, value in bn.items()}
    np.savez(tmp_path / "a.npz", **arrays, **{"bn/N": np.array(0)})  # type: ignore[arg-type]
    files = [str(tmp_path / "a.npz"), str(tmp_path / "a.pt")]
    assert cli.main(["convert", *files, "--avg-var-count", "4", "inf"]) == 0
    state = torch.load(files[1], weights_only=True)
    torch.testing.assert_close(state["bn.running_var"], torch.full((2,), 3 * 3 / 4))
