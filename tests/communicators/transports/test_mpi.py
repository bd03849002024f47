"""Processes and communicators of MPI beside MPI.COMM_WORLD's; each program has an mpiexec."""

from pathlib import Path

from tests.helpers import launch, require

NEEDS = "chainer"

_SPAWNED = """
import copy, pickle, sys
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
    for what in link, Group(comm, 2):
        try:
            pickle.dumps(what)
        except TypeError as error:
            print(error, flush=True)
    assert pickle.loads(pickle.dumps(link.comm.split(comm.rank))).size == 1
parts = [Group(comm, [0, 1]) for comm in merged]
for part in parts:
    part.allreduce(np.ones(1))
assert len({id(part._look_up()) for part in parts}) == len(parts)
"""


def test_processes_that_spawn_has_started(tmp_path: Path) -> None:
    """Copies share their communicator; a pickle, which could not find them, is refused at once."""
    require.need("mpiexec")
    (tmp_path / "program.py").write_text(_SPAWNED)
    ran = launch.run("mpiexec", 1, str(tmp_path / "program.py"), real=True)
    assert ran.returncode == 0, ran.stdout
    for ranks, rank in (("0, None", 0), ("None, 0", 1)):
        refused = f"cannot be pickled: got MPI(ranks=[{ranks}]), None for these, on its rank {rank}"
        assert ran.stdout.count(refused) == 4, ran.stdout


_SESSION = """
from mpi4py import MPI

session = MPI.Session.Init()
comm = MPI.Intracomm.Create_from_group(session.Create_group("mpi://WORLD"))

import pickle
import numpy as np
from multibn.chainer import MultiNodeBatchNormalization

link = MultiNodeBatchNormalization(1, comm, dtype="d")
for each in link, pickle.loads(pickle.dumps(link)):
    y = each(np.full((1, 1), 2.0 * comm.rank)).array
    np.testing.assert_allclose(y, 2 * comm.rank - 1, rtol=1e-4)
comm.Free()
session.Finalize()
"""


def test_a_communicator_of_a_session(tmp_path: Path) -> None:
    """Open MPI compares it with no communicator of the world."""
    require.need("mpiexec")
    (tmp_path / "program.py").write_text(_SESSION)
    ran = launch.run("mpiexec", 2, str(tmp_path / "program.py"), real=True)
    assert ran.returncode == 0, ran.stdout
