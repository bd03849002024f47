"""Every check of the `checks_*` modules, on real processes under real launchers."""

import importlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.helpers import launch, require


class Run(NamedTuple):
    """Where the checks of a module run, and what importing it takes."""

    module: str
    launchers: tuple[str, ...]
    sizes: tuple[int, ...]
    needs: tuple[str, ...] = ()


RUNS = [
    Run("checks_parity", launch.LAUNCHERS, (2, 3, 4)),
    Run("checks_communicators", launch.LAUNCHERS, (1, 2, 3, 4)),
    Run("checks_chainermn", ("mpiexec",), (2, 3, 4), ("chainer",)),
    Run("checks_chainer", launch.LAUNCHERS, (2, 3), ("chainer",)),
    Run("checks_chainer_extensions", launch.LAUNCHERS, (2, 3), ("chainer",)),
    Run("checks_torch", launch.LAUNCHERS, (2, 3), ("torch",)),
    Run("checks_sub_batch_norm", launch.LAUNCHERS, (1, 2, 4), ("torch",)),
    Run("checks_torch_features", launch.LAUNCHERS, (2, 4), ("torch",)),
    Run("checks_data_parallel", ("torchrun",), (2,), ("torch",)),
    Run("checks_together", launch.LAUNCHERS, (3,), ("torch",)),
    Run("checks_join", launch.LAUNCHERS, (3,), ("torch",)),
    Run("checks_join_chainer", ("mpiexec",), (3,), ("chainer",)),
    Run("checks_faults", ("mpiexec",), (2,), ("torch",)),
    Run("checks_reversible", launch.LAUNCHERS, (2,), ("torch",)),
    Run("checks_precise_bn", launch.LAUNCHERS, (2, 4), ("torch",)),
    Run("checks_mmengine", ("torchrun",), (1, 2), ("torch", "mmengine")),
    Run("checks_lightning", ("torchrun",), (2,), ("torch", "lightning")),
    Run("checks_collectives", launch.LAUNCHERS, (2, 8), ("torch", "chainer")),
    Run("checks_reversible_parity", ("mpiexec",), (2,), ("torch", "chainer")),
    # Last: its last check makes the default process group anew.
    Run("checks_grouped", launch.LAUNCHERS, (1, 2, 4), ("torch",)),
]


def _checks(run: Run) -> list[str]:
    if not require.available(*run.needs):
        return ["all"]  # a test that says what is missing
    contents = vars(importlib.import_module(f"tests.distributed.{run.module}"))
    return [name for name in contents if name.startswith("check_")]


def _tests() -> Iterator[object]:
    for run in RUNS:
        checks = _checks(run)
        for launcher in run.launchers:
            for size in run.sizes:
                for check in checks:
                    mark = pytest.mark.check(
                        launcher, size, f"tests.distributed.{run.module}:{check}", run.needs
                    )
                    name = f"{launcher}-{size}-{run.module}-{check}"
                    yield pytest.param((launcher, *run.needs), id=name, marks=mark)


@pytest.mark.parametrize("needs", list(_tests()))
def test_check(needs: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    require.need(*needs)
    complaint = request.getfixturevalue("complaint")
    assert not complaint, complaint
