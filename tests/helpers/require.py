"""Frameworks and launchers that tests need: skipped without them, failed if they were required."""

from collections.abc import Callable, Iterable

import pytest

from multibn._environment import find_command, importable

PROBES: dict[str, Callable[[], bool]] = {
    "torch": lambda: importable("torch"),
    "chainer": lambda: importable("chainer"),
    "numba": lambda: importable("numba"),
    "torchrun": lambda: importable("torch.distributed.run"),
    "mmengine": lambda: importable("mmengine"),
    "lightning": lambda: importable("lightning"),
    "cli": lambda: importable("rich") and importable("matplotlib"),
    "mpiexec": lambda: find_command("mpiexec") is not None and importable("mpi4py"),
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
    return all(PROBES[name]() for name in names)


def need(*names: str) -> None:
    """Skip the test, or at import the whole module, unless `names` are here."""
    for name in names:
        if available(name):
            continue
        if name in _required:
            pytest.fail(f"{name} is required and not available", pytrace=False)
        pytest.skip(f"{name} is not available", allow_module_level=True)
