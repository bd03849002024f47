"""Programs that start again with another number of ranks."""

import pickle

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
