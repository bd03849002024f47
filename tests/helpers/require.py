"""Frameworks and launchers that tests need: skipped without them, failed if they were required."""

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest


def _importable(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def mpiexec() -> str | None:
    """Path of mpiexec, this environment's own first."""
    own = Path(sys.executable).parent / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")


PROBES: dict[str, Callable[[], bool]] = {
    "torch": _importable("torch"),
    "chainer": _importable("chainer"),
    "torchrun": _importable("torch.distributed.run"),
    "mmengine": _importable("mmengine"),
    "lightning": _importable("lightning"),
    "mpiexec": lambda: mpiexec() is not None and _importable("mpi4py")(),
}

_required: set[str] = set()


def set_required(names: Iterable[str]) -> None:
    _required.clear()
    for name in names:
        if name not in PROBES:
            raise pytest.UsageError(f"--require knows {', '.join(PROBES)}: got {name!r}")
        _required.add(name)


def available(*names: str) -> bool:
    """Whether all of `names` are here."""
    try:
        return all(PROBES[name]() for name in names)
    except ModuleNotFoundError:  # the parent of a submodule
        return False


def need(*names: str) -> None:
    """Skip the test, or at import the whole module, unless `names` are here."""
    for name in names:
        if available(name):
            continue
        if name in _required:
            pytest.fail(f"{name} is required and not available", pytrace=False)
        pytest.skip(f"{name} is not available", allow_module_level=True)
