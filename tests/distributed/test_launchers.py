"""What a user sees of a launched script: the warning of a layer that stays local, and errors."""

import textwrap
import time
from pathlib import Path

import pytest

from tests.helpers import launch, require


def run_script(launcher: str, size: int, tmp_path: Path, code: str) -> tuple[int, str]:
    require.need("torch", launcher)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    result = launch.run(launcher, size, str(script), real=True)
    return result.returncode, result.stdout


@pytest.mark.parametrize("launcher", launch.LAUNCHERS)
def test_a_layer_that_stays_local_warns_once_and_names_the_fix(
    launcher: str, tmp_path: Path
) -> None:
    returncode, output = run_script(
        launcher,
        2,
        tmp_path,
        """
        import warnings
        import torch
        from multibn.torch_backend import SyncBatchNorm

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for layer in (SyncBatchNorm(3), SyncBatchNorm(3)):
                layer(torch.randn(4, 3))
                layer(torch.randn(4, 3))
        print(len(caught), "warning:", *[w.message for w in caught])
        """,
    )
    assert returncode == 0, output
    assert output.count("1 warning: batch statistics stay local to this process although the") == 2
    assert output.count("started 2") == 2
    fix = {
        "torchrun": "(WORLD_SIZE=2): no communicator was given and torch.distributed is not "
        "initialised. To share them, call torch.distributed.init_process_group()",
        "mpiexec": "(OMPI_COMM_WORLD_SIZE=2): no communicator was given and torch.distributed is "
        "not initialised. To share them, pass a communicator, mpi4py.MPI.COMM_WORLD for example",
    }[launcher]
    assert output.count(fix) == 2


@pytest.mark.parametrize("launcher", launch.LAUNCHERS)
def test_an_error_on_one_rank_ends_the_job(launcher: str, tmp_path: Path) -> None:
    over = {"torchrun": "gloo", "mpiexec": "mpi"}[launcher]
    start = time.monotonic()
    returncode, output = run_script(
        launcher,
        2,
        tmp_path,
        f"""
        import torch
        from multibn.torch_backend import SyncBatchNorm
        from multibn._launch import enter_world

        world = enter_world({over!r})
        layer = SyncBatchNorm(3, process_group=world)
        layer(torch.randn(4, 3 + world.rank))
        """,
    )
    assert returncode != 0
    assert "must have 3 channels in dimension 1" in output
    assert time.monotonic() - start < 60
