"""The pages and the docstrings, as far as no generator is needed; `make docs` checks the rest."""

import ast
import importlib
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import multibn
from multibn import Communicator
from tests.helpers import examples, launch, require
from tests.helpers.pages import MARKDOWN, script

# Public names: those that these packages export, and the parts that each package needs;
PACKAGES = {
    "multibn": (),
    "multibn.engine": (),
    "multibn.communicators": (),
    "multibn.checkpoint": (),
    "multibn.torch": ("torch",),
    "multibn.torch.lightning": ("lightning",),
    "multibn.torch.mmengine": ("mmengine",),
    "multibn.torch.reversible": ("torch",),
    "multibn.flax": ("flax",),
    "multibn.flax.linen": ("flax",),
    "multibn.chainer": ("chainer",),
}
# and those that users import from other files.
MODULES = {
    "multibn.communicators.transports.torch_distributed": (("TorchDistributed",), ("torch",)),
    "multibn.communicators.transports.mpi": (("MPI",), ("mpiexec",)),
    "multibn.communicators.transports.chainermn": (("ChainerMN",), ("chainer",)),
}
REFERENCE = launch.ROOT / "docs/reference"


@pytest.fixture(autouse=True)
def _slurm_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a command `srun` on PATH: Lightning warns of the command outside of a job."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.touch(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=os.pathsep)


def _import(module: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mmengine's and Lightning's own imports
        if "chainer" in module:
            importlib.import_module("multibn.chainer")  # makes Chainer importable
        return importlib.import_module(module)


def _exported(module: ModuleType) -> list[str]:
    """The names that an __init__.py imports as themselves."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    return [a.name for a in aliases if a.asname == a.name and not a.name.startswith("__")]


def _public(module: str) -> list[str]:
    if module in MODULES:
        names, needs = MODULES[module]
        require.need(*needs)
        return list(names)
    require.need(*PACKAGES[module])
    exported = _exported(_import(module))
    assert exported, f"{module} exports nothing: does its file still say `name as name`?"
    return exported


def _anchors(page: Path) -> set[str]:
    """The targets that GitHub and the site make of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=str)
def test_rows_of_a_table_have_as_many_cells_as_its_header(page: str) -> None:
    """A browser drops further ones, without a word."""
    text = re.sub(r"^```.*?^```", "", (launch.ROOT / page).read_text(), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        header, *rows = (re.findall(r"(?<!\\)\|", row) for row in table.splitlines())
        assert {len(row) for row in rows} == {len(header)}, table


@pytest.mark.parametrize("page", MARKDOWN, ids=str)
def test_links_lead_to_files_and_headings(page: str) -> None:
    path = launch.ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{page} links to {target}, which does not exist"
        assert page == "README.md" or anchor or linked != launch.ROOT / "docs/index.md", (
            f"{page} links to the landing page, which has no program: name the quick start"
        )
        if anchor:
            assert anchor in _anchors(linked), (
                f"{page} links to {target}, which has no such heading"
            )


# Pages whose blocks run elsewhere: pages/checks_examples.py, torch_backend/layer/checks_dtensor.py,
# and test_checkpoint.py.
ELSEWHERE = {"README.md", "docs/guides/dtensors.md", "docs/guides/from-chainermn-to-torch.md"}


@pytest.mark.parametrize(
    "page", [page for page in MARKDOWN if page not in ELSEWHERE and script(page).strip()]
)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = script(page)
    parts = [part for part in ("chainer", "flax", "lightning", "mmengine") if part in code]
    require.need("torch", *parts)
    for part in parts:
        if part not in ("chainer", "flax"):
            _import(f"multibn.torch.{part}")  # without the trainer's warnings
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": page})


# Docstrings.


def _methods(value: Any) -> Iterator[str]:
    """The public methods and properties that a class defines itself, but for a communicator's."""
    for name, member in vars(value).items():
        if name.startswith("_") or (value is not Communicator and name in vars(Communicator)):
            continue
        if inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod)):
            yield name


def _parameters(value: Any) -> list[str]:
    if inspect.isclass(value):
        maker = next(c for c in value.__mro__ if "__init__" in vars(c) or "__new__" in vars(c))
        if not maker.__module__.startswith("multibn"):
            return []  # another library describes the constructor
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(value).parameters.values()
    return [p.name for p in parameters if p.kind not in variadic and not p.name.startswith("_")]


def _names(parameter: str, doc: str) -> bool:
    """Whether a section lists the parameter, or a sentence has the name in backticks."""
    listed = rf"^(?:\*{{0,2}}\w+, )*{parameter}(?:, \*{{0,2}}\w+)*(?: : .*)?$"
    return bool(re.search(listed, doc, re.MULTILINE) or f"`{parameter}`" in doc)


def _with_references(name: str, module: ModuleType) -> str:
    """A docstring, and those of the names whose parameters a docstring says are its own."""
    texts: dict[str, str] = {}
    names = [name]
    while names:
        name = names.pop()
        around = importlib.import_module(module.__name__.rpartition(".")[0] or "multibn")
        value = getattr(module, name, getattr(around, name, None))
        if name in texts or value is None:
            continue
        texts[name] = inspect.cleandoc(value.__doc__ or "")
        phrases = r"(?:(?<!raises\s)\b[Aa]s|\b[Pp]arameters\s+are\s+those\s+of)\s+`([\w.]+)`"
        names += [named.rpartition(".")[2] for named in re.findall(phrases, texts[name])]
    return "\n".join(texts.values())


@pytest.mark.parametrize("module", [*PACKAGES, *MODULES])
def test_docstrings_name_the_parameters(module: str) -> None:
    names = _public(module)
    imported = _import(module)
    complaints = []
    for name in names:
        value = getattr(imported, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue  # a type
        doc = inspect.cleandoc(value.__doc__ or "")
        if not doc:
            complaints.append(f"{name} has no docstring")
        described = _with_references(name, imported)
        complaints += [
            f"{name}: the docstring does not name {parameter}"
            for parameter in _parameters(value)
            if not _names(parameter, described)
        ]
        if inspect.isclass(value):
            complaints += [
                f"{name}.{member} has no docstring"
                for member in _methods(value)
                if not inspect.getdoc(getattr(value, member))
            ]
    assert not complaints, "\n".join(complaints)


# The reference.


def _listed() -> dict[str, Path]:
    """The names of the lists in docs/reference, with their modules."""
    names = {}
    for page in REFERENCE.glob("*.md"):
        module = ""
        for line in page.read_text().splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.removeprefix(".. currentmodule:: ")
            elif re.fullmatch(r"   [\w.]+", line):
                name = f"{module}.{line.strip()}"
                assert name not in names, f"{name} is listed twice"
                names[name] = page
    return names


def test_the_reference_lists_every_public_name_once() -> None:
    public = {f"{module}.{name}" for module in [*PACKAGES, *MODULES] for name in _public(module)}
    # `multibn` exports some names of these, under which they are listed.
    public -= {
        f"{module}.{name}"
        for module in ("multibn.communicators", "multibn.engine")
        for name in _public(module)
        if f"multibn.{name}" in public
    }
    listed = set(_listed())
    assert not public - listed, f"docs/reference must list {public - listed}"
    assert not listed - public, f"`PACKAGES` and `MODULES` have no {listed - public}"


@pytest.mark.parametrize("framework", ["torch", "chainer"])
def test_one_path_has_every_name_of_a_framework(framework: str) -> None:
    require.need(framework)
    path, room = _import(f"multibn.{framework}"), _import(f"multibn.{framework}_backend")
    assert set(_exported(path)) == set(_exported(room))
    assert all(getattr(path, name) is getattr(room, name) for name in _exported(room))


SHOWN = [p for p in MARKDOWN if not p.startswith(("docs/decisions/", "CHANGELOG", "CONTRIB"))]


def test_pages_examples_and_docstrings_have_one_import_path() -> None:
    texts = {p: (launch.ROOT / p).read_text() for p in SHOWN}
    texts |= {str(p): p.read_text() for p in (launch.ROOT / "examples").glob("*.py")}
    for path in (launch.ROOT / "multibn").rglob("*.py"):
        nodes = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
        texts[str(path)] = "\n".join(s for n in nodes if " " in (s := str(n.value)))
    rooms = re.compile(r"multibn\.(torch|flax|chainer)_backend")
    assert not [path for path, text in texts.items() if rooms.search(text)]


def test_a_name_that_the_top_level_lacks_is_looked_for_elsewhere() -> None:
    message = "'multibn' has no attribute 'convert_sync_batchnorm'.*write `multibn.torch.convert_s"
    with pytest.raises(AttributeError, match=message):
        _ = multibn.convert_sync_batchnorm
    require.need("torch")
    assert multibn.torch is _import("multibn.torch")


# Examples that run elsewhere, on ranks: tests/pages/checks_examples.py.
ON_RANKS = {
    "multibn.communicators.transports.torch_distributed.TorchDistributed",
    "multibn.communicators.transports.mpi.MPI",
    "multibn.communicators.transports.chainermn.ChainerMN",
}


@pytest.mark.parametrize("public", sorted(_listed()))
def test_every_public_name_has_an_example_that_runs(public: str) -> None:
    package, _, name = public.rpartition(".")
    require.need(*(MODULES[package][1] if package in MODULES else PACKAGES[package]))
    doc = examples.docstring(_import(package), name)
    if public in ON_RANKS:
        assert f"{name}(" in doc.partition(">>> ")[2]
        return
    for framework in ("torch", "chainer"):
        if re.search(rf">>> .*\b{framework}", doc):
            require.need(framework)
    complaints = examples.complaints(name, doc)
    assert not complaints, complaints
