"""What importing brings in, and which room imports which."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import launch, require
from tests.helpers.launch import ROOT

PACKAGE = ROOT / "multibn"

# From the bottom up: modules, and folders for the modules in them that stand on no other floor.
# A module imports from its own floor and from those below.
FLOORS = """
_typing _version _platform _warnings registry
options
_arrays checkpoint.files
wire communicators.communicator communicators.diagnostics communicators.polling
checkpoint communicators.watchdog communicators.exit communicators.deferred_checks
communicators.channel
communicators.handshake communicators.nonfinite communicators.resolve
communicators.transports communicators.layer_communicator
communicators kernels.spec kernels.layout kernels.core
kernels.steps kernels.triton.steps
kernels.reference kernels.triton
kernels
engine.masks
engine.statistics
engine.running engine.recompute
engine checkpoint.pool
multibn torch_backend._torch_private
torch_backend.layer chainer_backend flax_backend.mesh_axis
torch_backend.train torch_backend.norms flax_backend.functional
flax_backend.nnx flax_backend.linen
torch_backend.convert torch_backend.precise_bn torch_backend.reversible
torch_backend.reversible.mvit torch_backend.integrations
torch_backend flax_backend
torch chainer flax
parity.launch
parity info
check
cli __main__
"""


@cache
def _modules() -> dict[str, Path]:
    """Files by the names of their modules, without "multibn." in front."""
    modules = {}
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name.removeprefix("multibn.")] = path
    return modules


@cache
def _arrows() -> dict[str, set[str]]:
    """The modules of the package that each one imports, inside of functions and by name too."""
    modules = _modules()
    arrows: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported = [
                    name if name.removeprefix("multibn.") in modules else node.module or ""
                    for name in names
                ]
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                imported = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
            ours = (name for name in imported if name.split(".")[0] == "multibn")
            arrows[module] |= {name.removeprefix("multibn.") for name in ours} & modules.keys()
    return arrows


def test_every_module_stands_on_a_floor() -> None:
    entries = set(FLOORS.split())
    assert len(entries) == len(FLOORS.split())
    inside = {m.rpartition(".")[0] for m in _modules()}
    assert entries <= _modules().keys() | inside, "the floors name modules that are gone"
    assert not [m for m in _modules() if _floor(m) < 0]


def _floor(module: str) -> int:
    """The floor of a module, or of the innermost folder around it that stands on one."""
    lines = enumerate(FLOORS.splitlines())
    floors = {name: number for number, line in lines for name in line.split()}
    parts = module.split(".")
    places = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((floors[place] for place in places if place in floors), -1)


def test_imports_point_down() -> None:
    up = [
        f"{module} imports {imported}"
        for module, others in _arrows().items()
        for imported in others
        if _floor(imported) > _floor(module)
        and not imported.startswith(f"{module}.")  # a folder names what is in it
    ]
    assert up == []


def test_folders_have_at_most_twelve_files() -> None:
    """Nobody finds a file in a larger folder: make folders inside of it."""
    kinds = ("*.py", "*.pyi", "*.[ch]")
    files = [p for room in (PACKAGE, ROOT / "tests") for kind in kinds for p in room.rglob(kind)]
    counts = Counter(path.parent for path in files if path.stem != "__init__")
    assert not {str(folder): count for folder, count in counts.items() if count > 12}


# A docstring that begins with one of these lacks its subject: a reader looks for it in the name.
PREPOSITIONS = """
about against as at before after beside between by during for from in into like of on over per
through to under upon via with within without
"""


def test_no_docstring_begins_with_a_preposition() -> None:
    found = []
    for folder in ("multibn", "tests", "examples", "benchmarks", "faults", "evidence"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    words = re.findall(r"\w+", ast.get_docstring(node) or "")
                    if words and words[0].lower() in PREPOSITIONS.split():
                        found.append(f"{path.relative_to(ROOT)}: {' '.join(words[:6])} ...")
    assert not found, "Begin these docstrings with a subject or a verb:\n" + "\n".join(found)


def test_private_names_of_torch_stand_in_one_file() -> None:
    private = re.compile(r"torch\._C|\.compiler\._|torch\._(?!_|dynamo|inductor)\w+")
    allowed = "_torch_private.py"
    found = [
        f"{path.name}: {line.strip()}"
        for path in (PACKAGE / "torch_backend").rglob("*.py")
        for line in path.read_text().splitlines()
        if private.search(line) and path.name != allowed
    ]
    assert not found, f"Give these a name in multibn/torch_backend/{allowed}:\n" + "\n".join(found)


def test_modules_import_each_other_in_no_circles() -> None:
    arrows = _arrows()
    reached: dict[str, set[str]] = {}
    for module in arrows:
        reached[module] = set()
        new = arrows[module]
        while new := new - reached[module]:
            reached[module] |= new
            new = {further for each in new for further in arrows[each]}
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in arrows
        if module in reached[module]
    }
    assert not circles


@pytest.mark.parametrize(
    "module, absent",
    [
        ("multibn.cli", ["torch", "chainer", "jax", "cupy", "mpi4py"]),
        ("multibn", ["torch", "chainer", "cupy", "mpi4py", "numpy.random"]),
        ("multibn.checkpoint", ["torch", "chainer", "jax", "safetensors", "numpy.random"]),
        (
            "multibn.torch",
            ["chainer", "cupy", "mpi4py", "torch._dynamo", "torch.distributed.tensor"],
        ),
        ("multibn.chainer", ["torch", "mpi4py.MPI"]),
        ("multibn.flax", ["torch", "chainer", "cupy", "mpi4py"]),
    ],
)
def test_importing_and_naming_ranks_bring_in_no_framework(module: str, absent: list[str]) -> None:
    backend = module.rpartition(".")[2].partition("_")[0]
    if backend in ("torch", "chainer", "flax"):
        require.need(backend)
    # NumPy 1 imports numpy.random itself.
    code = f"""\
import sys, numpy
own = set(sys.modules)
import {module}
multibn.as_communicator(1)
print([m for m in {absent} if m in set(sys.modules) - own])"""
    assert launch.printed("-W", "error", "-c", code) == "[]\n"
