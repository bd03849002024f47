"""Communicators without a launcher; processes and communicators beside MPI.COMM_WORLD's."""

import os
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from multibn.communicators import DefaultCommunicator, SingleProcess, as_communicator
from tests.helpers import launch, require
from tests.helpers.ranks import CountingCommunicator


def test_a_communicator_stands_for_itself_and_none_for_default() -> None:
    alone = SingleProcess()
    assert as_communicator(alone) is alone
    counting = CountingCommunicator(alone)
    assert as_communicator(counting) is counting
    assert isinstance(as_communicator(), DefaultCommunicator)
    assert repr(as_communicator()) == "DefaultCommunicator()"
    with pytest.raises(TypeError, match=r"got 'gloo' of type str\. Pass None for the de"):
        as_communicator("gloo")  # type: ignore[arg-type]
    methods = type("Own", (SimpleNamespace,), {"rank": lambda self: 0, "size": property(int)})
    for other in (methods(allreduce=0, split=0), SingleProcess):
        with pytest.raises(TypeError, match=r"\(an instance, whose `rank` .* of type (Own|type)\."):
            as_communicator(other)  # type: ignore[arg-type]


_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def test_a_default_that_stays_local_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("multibn.communicators.diagnostics._has_warned", False)
    default = DefaultCommunicator()
    for quiet in (None, "1", "many"):
        if quiet:
            monkeypatch.setenv("PMI_SIZE", quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert default.size == 1
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.warns(UserWarning, match=r"started 2 processes \(PMI_SIZE=2\).*SingleProcess"):
        assert default.size == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default.allreduce(np.ones(1)) == 1


_WORLDS = """if True:
    import warnings
    import numpy as np
    from multibn import Group, SingleProcess, as_communicator
    if {mpi}:
        from mpi4py import MPI
        native, alone = MPI.COMM_WORLD, MPI.COMM_SELF
    else:
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        native, alone = dist.group.WORLD, 1
    world = as_communicator(native)
    for quiet in (SingleProcess(), Group(world, 1), as_communicator(alone)):
        quiet.allreduce(np.ones(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loud in (world, Group(native, "machine"), world.split(0)):
            loud.allreduce(np.ones(1))
    print(*[w.message for w in caught])
"""


@pytest.mark.parametrize(
    "library, variable",
    [*zip(["torch", "mpi4py"] * 2, _SIZES, strict=True), ("torch", ""), ("mpi4py", "")],
)
def test_a_world_of_one_under_a_launcher_of_several_warns(library: str, variable: str) -> None:
    """The launcher is another MPI's, for example; a group that is meant to be one is quiet."""
    require.need(*{"torch": ["torch"], "mpi4py": ["mpiexec"]}[library])
    script = _WORLDS.format(mpi=library == "mpi4py")
    variables = launch.VARIABLES | {variable or "_": "2"}
    command = "-W", "error", "-c", script
    said = launch.printed(*command, interpreter=launch.python(), alone=True, **variables)
    name, fix = {
        "torch": ("torch.distributed", r"pass init_process_group\(\) the"),
        "mpi4py": ("MPI.COMM_WORLD", "start the program by the mpiexec"),
    }[library]
    told = rf"batch .* started 2 processes \({variable}=2\): {name} has 1 process\. To share them, "
    told += rf"{fix} .*; to keep them local, pass multibn\.SingleProcess\(\)\.\n"
    assert re.fullmatch(told if variable else r"\n", said), said


def test_a_restored_group_says_what_is_missing() -> None:
    require.need("torch")
    from multibn.communicators.transports.torch_distributed import TorchDistributed, restore

    for ranks, said in (((0,), "0"), ((0, 1), "0, 1")):
        refused = rf"made for ranks \[{said}\] of torch\.distributed, and no process group is "
        remedy = r"initialised\. Call torch\.distributed\.init_process_group\(\) first\.$"
        with pytest.raises(RuntimeError, match=refused + remedy):
            restore(ranks).allreduce(np.ones(1))
    with pytest.raises(ValueError, match=r"Default process group has not been initialized"):
        TorchDistributed().allreduce(np.ones(1))
    expected = r"must be a torch ProcessGroup, a DeviceMesh or None: got 'gloo' of type str\.$"
    with pytest.raises(TypeError, match=expected):
        TorchDistributed("gloo")


def test_this_process_has_no_mpi_and_no_group() -> None:
    assert "mpi4py.MPI" not in sys.modules
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized()
    assert "RANK" not in os.environ


def test_a_program_may_finalize_mpi_itself(tmp_path: Path) -> None:
    """Nothing is sent any more at the end of the process."""
    require.need("mpiexec")
    (tmp_path / "program.py").write_text(
        "import numpy as np\nfrom mpi4py import MPI\nfrom multibn import as_communicator\n"
        "from tests.communicators.phases import Phase\n"
        "groups = [MPI.COMM_WORLD, MPI.COMM_WORLD.Split(0)]\n"
        "phases = [Phase(as_communicator(group), 'bn') for group in groups]\n"
        "for phase in phases:\n    phase.allreduce(np.ones(8))\n"
        "MPI.Finalize()\n"
    )
    ran = launch.run("mpiexec", 2, str(tmp_path / "program.py"), real=True)
    assert ran.returncode == 0, ran.stdout


_SPAWNED = """
import copy, sys
import numpy as np
from mpi4py import MPI

parent = MPI.Comm.Get_parent()
groups = [parent] if parent else [
    MPI.COMM_SELF.Spawn(sys.executable, ["-m", "mpi4py", __file__], maxprocs=1) for _ in range(2)]
merged = [group.Merge(high=group == parent) for group in groups]

from multibn import Group, as_communicator
from tests.communicators.phases import Phase

for comm in map(as_communicator, merged):
    summed = Phase(comm, "bn").allreduce(np.arange(4.0) + comm.rank)
    np.testing.assert_array_equal(summed, 2 * np.arange(4.0) + 1)
    assert copy.deepcopy(comm) is comm
parts = [Group(comm, "machine") for comm in merged]
for part in parts:
    part.allreduce(np.ones(1))
assert len({part._look_up().channel for part in parts}) == len(parts)
"""


def test_processes_that_spawn_has_started(tmp_path: Path) -> None:
    """Each merged communicator is its own, although the world's ranks in them are equal."""
    require.need("mpiexec")
    (tmp_path / "program.py").write_text(_SPAWNED)
    ran = launch.run("mpiexec", 1, str(tmp_path / "program.py"), real=True)
    assert ran.returncode == 0, ran.stdout
