"""Programs that start again with another number of ranks."""

import os
import pickle
import subprocess
import sys

from faults.scenarios._scenario import scenario
from faults.trial import Trial
from multibn import as_communicator


def _save_state(trial: Trial) -> None:
    trial.build()
    trial.steps(2)
    if trial.rank == 0:
        trial.trainee.save(trial.files / "state")


@scenario("a restart on 3 ranks, with the state that 2 have saved", earlier=_save_state)
def restart(trial: Trial) -> None:
    trial.build()
    trial.mark()
    trial.trainee.load(trial.files / "state")
    trial.resume(2, size=2)
    trial.steps(2)


def _save_layers(trial: Trial) -> None:
    trial.build(communicator=trial.everybody)
    trial.steps(2)
    if trial.rank == 0:
        (trial.files / "layers").write_bytes(pickle.dumps(trial.trainee.norms()))


@scenario(
    "... with the pickled layers of 2",
    earlier=_save_layers,
    setups=("shared memory", "gloo", "mpi", "chainermn"),
)
def restart_pickled(trial: Trial) -> None:
    trial.build()
    trial.mark()
    trial.trainee.set_norms(pickle.loads((trial.files / "layers").read_bytes()))
    trial.resume(2, size=2)
    trial.steps(2)


def _save_half(trial: Trial) -> None:
    trial.build(communicator=as_communicator(trial.everybody).split(trial.rank // 2))
    trial.step()
    if trial.rank == 2:
        (trial.files / "half").write_bytes(pickle.dumps(trial.trainee.norms()))


@scenario(
    "... with the pickled layers of a group of rank 3",
    says=r"made for ranks \[2, 3\] of [\w.]+, and this is rank \d of 3\. Give the layer another",
    earlier=_save_half,
    earlier_size=4,
    setups=("shared memory", "gloo", "mpi"),
)
def restart_group(trial: Trial) -> None:
    trial.build()
    trial.mark()
    trial.trainee.set_norms(pickle.loads((trial.files / "half").read_bytes()))
    trial.step()


@scenario(
    "a rank that ends, under torchrun's --max-restarts",
    seconds=10.0,
    ends=True,
    setups=("shared memory", "gloo", "ddp"),
    variables={"PET_MAX_RESTARTS": "2"},
    deadline=30.0,  # ranks of the second attempt do not wait for each other before their first step
)
def max_restarts(trial: Trial) -> None:
    trial.build()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        trial.steps(2)
        if trial.at_fault:
            os._exit(1)
        trial.step()  # an error, here, of the ranks that are left
    trial.mark()
    trial.steps(3)


_ALONE = """
import torch
from mpi4py.MPI import COMM_WORLD
from multibn.torch import SyncBatchNorm
SyncBatchNorm(3, process_group=COMM_WORLD)(torch.randn(4, 3))
"""


@scenario(
    "each rank in a world of its own, as started by another MPI's launcher",
    says=r"UserWarning: batch statistics are not synchronized.* started 3 .*\(PMI_SIZE=3\): "
    r"MPI\.COMM_WORLD has 1 process\. .*start the program by the mpiexec",
    seconds=60.0,  # of a process with torch
    setups=("mpi",),
)
def world_of_one(trial: Trial) -> None:
    trial.mark()
    of_launcher = "OMPI_", "PMIX_", "PRTE_", "PMI_"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(of_launcher)}
    variables |= {"PMI_RANK": str(trial.rank), "PMI_SIZE": str(trial.size)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _ALONE]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr.splitlines()[-1])
    trial.begin()
