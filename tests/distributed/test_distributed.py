"""Every check of the `checks_*` modules, on real processes under real launchers."""

import pytest

from tests.helpers import launch
from tests.helpers.runs import Run, assert_passed, on_ranks

RUNS = [
    Run("checks_parity", launch.LAUNCHERS, (2, 3, 4)),
    Run("checks_communicators", launch.LAUNCHERS, (1, 2, 3, 4)),
    Run("checks_chainermn", ("mpiexec",), (2, 3, 4), ("chainer",)),
    Run("checks_chainer", launch.LAUNCHERS, (2, 3), ("chainer",)),
    Run("checks_chainer_extensions", launch.LAUNCHERS, (2, 3), ("chainer",)),
    Run("checks_torch", launch.LAUNCHERS, (2, 3), ("torch",)),
    Run("checks_sub_batch_norm", launch.LAUNCHERS, (1, 2, 4), ("torch",)),
    Run("checks_torch_features", launch.LAUNCHERS, (2, 4), ("torch",)),
    Run("checks_torch_func", ("torchrun",), (2,), ("torch",)),
    Run("checks_data_parallel", ("torchrun",), (2,), ("torch",)),
    Run("checks_together", launch.LAUNCHERS, (3,), ("torch",)),
    Run("checks_join", launch.LAUNCHERS, (3,), ("torch",)),
    Run("checks_chainer_sync", ("mpiexec",), (3,), ("chainer",)),
    Run("checks_faults", ("mpiexec",), (2,), ("torch",)),
    Run("checks_reversible", launch.LAUNCHERS, (2,), ("torch",)),
    Run("checks_precise_bn", launch.LAUNCHERS, (2, 4), ("torch",)),
    Run("checks_mmengine", ("torchrun",), (1, 2), ("torch", "mmengine")),
    Run("checks_lightning", ("torchrun",), (2,), ("torch", "lightning")),
    Run("checks_collectives", launch.LAUNCHERS, (2, 8), ("torch", "chainer")),
    Run("checks_reversible_masks", launch.LAUNCHERS, (2,), ("torch",)),
    Run("checks_dtensor", ("torchrun",), (4,), ("torch",)),
    Run("checks_pipeline", ("torchrun",), (4,), ("torch",)),
    Run("checks_examples", launch.LAUNCHERS, (2,)),
    Run("checks_soak", launch.LAUNCHERS, (2,), ("torch",)),
    # Last: its last check makes the default process group anew.
    Run("checks_grouped", launch.LAUNCHERS, (1, 2, 4), ("torch",)),
]


@on_ranks(__package__, RUNS)
def test_check(needs: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    assert_passed(needs, request)
