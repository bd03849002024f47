"""Every check of the `checks_*` modules, on real processes under real launchers."""

import importlib

import pytest

from tests.helpers import launch, require

require.need("torch", "chainer")

# Where each module's checks run: launchers, numbers of ranks.
RUNS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "checks_parity": (launch.LAUNCHERS, (2, 3, 4)),
    "checks_chainermn": (("mpiexec",), (2, 3, 4)),
    "checks_communicators": (launch.LAUNCHERS, (2, 4)),
    "checks_torch": (launch.LAUNCHERS, (2, 3)),
    "checks_chainer": (launch.LAUNCHERS, (2, 3)),
}


def _tests() -> list[tuple[str, int, str, str]]:
    return [
        (launcher, size, module, name)
        for module, (launchers, sizes) in RUNS.items()
        for launcher in launchers
        for size in sizes
        for name in check_names(module)
    ]


def check_names(module: str) -> list[str]:
    contents = vars(importlib.import_module(f"tests.distributed.{module}"))
    return [name for name in contents if name.startswith("check_")]


@pytest.mark.parametrize("launcher, size, module, check", _tests())
def test_check(launcher: str, size: int, module: str, check: str) -> None:
    launch.expect_success(launcher, size, module, check)
