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


_FINALIZED = """
import pickle
import numpy as np
from mpi4py import MPI
from multibn import as_communicator
from multibn.chainer import MultiNodeBatchNormalization, check_sync
from chainer import using_config

cold, warm = MultiNodeBatchNormalization(1, MPI.COMM_WORLD), as_communicator(MPI.COMM_WORLD)
link = MultiNodeBatchNormalization(1, warm.split(0))
x = np.arange(2, dtype="f").reshape(2, 1)
y = [link(x) for _ in range(60)][-1]  # the last ones by persistent requests
y.grad = x
MPI.Finalize()
for each in (
    lambda: cold(x), lambda: link(x), y.backward, lambda: link(x[:1]), lambda: check_sync(link),
    lambda: warm.rank, lambda: warm.split(0), lambda: as_communicator(MPI.COMM_WORLD),
    lambda: pickle.loads(pickle.dumps(link))(x),
):
    try:
        each()
    except RuntimeError as error:
        print(error, flush=True)
with using_config("train", False):
    link(x)
"""


def test_what_comes_after_the_end_of_mpi_is_named(tmp_path: Path) -> None:
    """Nearly all functions of MPI would abort the process."""
    require.need("mpiexec")
    (tmp_path / "program.py").write_text(_FINALIZED)
    ran = launch.run("mpiexec", 2, str(tmp_path / "program.py"), real=True)
    assert ran.returncode == 0, ran.stdout
    lines = ran.stdout.splitlines()
    assert len(lines) == 18, ran.stdout
    assert all("any more" in line and "MPI.Finalize() was called. Ca" in line for line in lines)
