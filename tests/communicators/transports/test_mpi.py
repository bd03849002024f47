"""Processes and communicators of MPI beside MPI.COMM_WORLD's; each program has an mpiexec."""

from pathlib import Path

from tests.helpers import launch, require

NEEDS = "chainer"

_SPAWNED = """
import copy, sys
import numpy as np
from mpi4py import MPI

parent = MPI.Comm.Get_parent()
groups = [parent] if parent else [
    MPI.COMM_SELF.Spawn(sys.executable, ["-m", "mpi4py", __file__], maxprocs=1) for _ in range(2)]
merged = [group.Merge(high=group == parent) for group in groups]

from multibn import Group
from multibn.chainer import MultiNodeBatchNormalization, check_sync

for comm in merged:
    link = MultiNodeBatchNormalization(1, comm, dtype="d")
    y = link(np.full((1, 1), 2.0 * comm.rank)).array
    np.testing.assert_allclose(y, 2 * comm.rank - 1, rtol=1e-4)
    other = copy.deepcopy(link)
    assert other.comm is link.comm
    other(np.ones((4, 1)))
    check_sync(other)
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
