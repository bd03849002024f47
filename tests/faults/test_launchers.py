"""What a user sees of a launched script: the warning of a layer that stays local, and errors."""

import textwrap
from typing import NamedTuple

import pytest

from tests.helpers import launch, require

pytestmark = pytest.mark.launches

_SCRIPT = """
    import sys, warnings
    import torch
    from multibn.torch_backend import SyncBatchNorm
    from multibn.parity.launch import enter_world

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layer in (SyncBatchNorm(3), SyncBatchNorm(3)):
            layer(torch.randn(4, 3))
            layer(torch.randn(4, 3))
    said = "".join(str(w.message) for w in caught)
    # In one write: torchrun starts `python -u`, with which the words of two ranks would mix.
    print(f"{len(caught)} warning: {said}\\n", end="", flush=True)

    world = enter_world(sys.argv[1])
    layer = SyncBatchNorm(3, process_group=world)
    layer(torch.randn(4, 3 + world.rank))
"""


class Ran(NamedTuple):
    launcher: str
    exit_status: int
    output: str


@pytest.fixture(scope="module", params=launch.LAUNCHERS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The script on two ranks, as a user starts it."""
    launcher = request.param
    require.need("torch", launcher)
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    over = {"torchrun": "gloo", "mpiexec": "mpi"}[launcher]
    result = launch.run(launcher, 2, str(script), over)
    return Ran(launcher, result.returncode, result.stdout)


def test_a_layer_that_stays_local_warns_once_and_names_the_fix(ran: Ran) -> None:
    warning = "1 warning: batch statistics are not synchronized, although the"
    assert ran.output.count(warning) == 2, ran.output
    assert ran.output.count("started 2") == 2
    fix = {
        "torchrun": "(WORLD_SIZE=2): no communicator was given and torch.distributed is not "
        "initialised. To share them, call torch.distributed.init_process_group()",
        "mpiexec": "(OMPI_COMM_WORLD_SIZE=2): no communicator was given and torch.distributed is "
        "not initialised. To share them, pass a communicator, mpi4py.MPI.COMM_WORLD for example",
    }[ran.launcher]
    assert ran.output.count(fix) == 2


def test_an_error_on_one_rank_ends_the_job(ran: Ran) -> None:
    assert ran.exit_status > 0, ran.output  # negative if the ranks had to be ended
    assert "must have 3 channels in dimension 1" in ran.output
