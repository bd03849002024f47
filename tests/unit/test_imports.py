"""What importing brings in, and which room imports which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import require
from tests.helpers.launch import ROOT

PACKAGE = ROOT / "multibn"

# Rooms from the bottom up; a module imports only from its own room and from those below.
ROOMS = [
    [
        "multibn._typing",
        "multibn._version",
        "multibn._arrays",
        "multibn._environment",
        "multibn._progress",
        "multibn.message",
        "multibn.checkpoint.files",
    ],
    ["multibn.checkpoint.keys"],
    ["multibn.checkpoint.norms"],
    ["multibn.communicators.base"],
    [
        *("multibn.communicators.names", "multibn.communicators.objects"),
        *("multibn.communicators.watch", "multibn.communicators.default"),
        "multibn.communicators.groups",
    ],
    [
        *("multibn.communicators.lines", "multibn.communicators.transports.store"),
        "multibn.communicators.transports._shared_memory",
        "multibn.communicators.lookup",
    ],
    [
        *("multibn.communicators.agreement", "multibn.communicators.transports.mpi_lines"),
        *("multibn.communicators.transports.tcp", "multibn.communicators.transports.shared_lines"),
    ],
    ["multibn.communicators.transports.mpi", "multibn.communicators.transports.shared_memory"],
    ["multibn.communicators.transports.nccl", "multibn.communicators.transports.torch_distributed"],
    ["multibn.communicators.transports.chainermn", "multibn.communicators.conversation"],
    ["multibn.communicators", "multibn.kernels"],
    ["multibn.engine.masks", "multibn.engine.statistics"],
    [
        "multibn.engine.population",
        "multibn.engine.recompute",
        "multibn.engine.step",
        "multibn.checkpoint",
        "multibn.engine.lockstep",
        "multibn.engine.participants",
        "multibn.engine.synchrony",
    ],
    ["multibn"],
    ["multibn.torch_backend", "multibn.chainer_backend", "multibn.registry"],
    ["multibn.torch_backend.integrations", "multibn.torch_backend.reversible"],
    ["multibn.torch_backend.reversible.mvit"],
    ["multibn._launch"],
    ["multibn.parity", "multibn.info"],
    ["multibn.cli", "multibn.__main__"],
]


def _room(module: str) -> int:
    names = [(name, level) for level, names in enumerate(ROOMS) for name in names]
    matches = [
        (len(name), level)
        for name, level in names
        if module == name or (module.startswith(name + ".") and name != "multibn")
    ]
    assert matches, f"{module} stands in no room"
    return max(matches)[1]


def _modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parent = ROOT / node.module.replace(".", "/")
            found += [
                f"{node.module}.{alias.name}"
                if (parent / f"{alias.name}.py").exists() or (parent / alias.name).is_dir()
                else node.module
                for alias in node.names
            ]
    return found


@pytest.mark.parametrize("module, path", _modules(), ids=lambda value: str(value))
def test_imports_point_down(module: str, path: Path) -> None:
    backends = {"torch_backend", "chainer_backend"}
    for imported in _imports(path):
        if imported.split(".")[0] != "multibn":
            continue
        if path.name == "__init__.py" and imported.startswith(f"{module}."):
            continue  # a folder names what its own rooms offer
        assert _room(imported) <= _room(module), f"{module} imports {imported}"
        other = backends & set(imported.split("."))
        if module.startswith(("multibn.parity", "multibn._launch")):
            continue  # serve both, and import each where it is used
        assert not other or other <= set(module.split(".")), f"{module} imports {imported}"


@pytest.mark.parametrize(
    "module, absent",
    [
        ("multibn.cli", ["torch", "chainer", "cupy", "mpi4py", "rich", "matplotlib"]),
        ("multibn", ["torch", "chainer", "cupy", "mpi4py", "numpy.random"]),
        ("multibn.checkpoint", ["torch", "chainer", "safetensors", "numpy.random"]),
        (
            "multibn.torch_backend",
            ["chainer", "cupy", "mpi4py", "torch._dynamo", "torch.distributed.tensor"],
        ),
        ("multibn.chainer_backend", ["torch", "mpi4py.MPI"]),
    ],
)
def test_importing_brings_in_no_other_framework(module: str, absent: list[str]) -> None:
    backend = module.rpartition(".")[2].partition("_")[0]
    if backend in ("torch", "chainer"):
        require.need(backend)
    # NumPy 1 imports numpy.random itself.
    code = f"""\
import sys, numpy
own = set(sys.modules)
import {module}
print([m for m in {absent} if m in set(sys.modules) - own])"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr
