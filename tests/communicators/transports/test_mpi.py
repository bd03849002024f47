"""Processes and communicators of MPI beside MPI.COMM_WORLD's; each program has an mpiexec."""

from pathlib import Path

from tests.helpers import launch, require

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
