"""Group norms, batch renormalization and running norms that differ between the ranks."""

from typing import Any

from faults.scenarios._scenario import differ, scenario
from faults.scenarios.ranks import MPIEXEC, kill
from faults.trial import Trial

_BUILT = "have built SyncGroupNorm differently: "
_SETUPS = ("shared memory", "gloo", "mpi", "own")  # of torch, without DistributedDataParallel


def _group_norm(trial: Trial, num_groups: int = 2) -> Any:
    from multibn.torch import SyncGroupNorm

    return SyncGroupNorm(num_groups, 4, process_group=trial.communicator)


def _run(layer: Any, num_samples: int = 2, steps: int = 2) -> None:
    import torch

    for _ in range(steps):
        layer(torch.arange(num_samples * 12.0).view(num_samples, 4, 3).requires_grad_())


@scenario(
    "another number of samples of a group norm on a rank",
    says=differ("4 channels, N=2, num_groups=2", "6 channels, N=3", _BUILT),
    setups=_SETUPS,
)
def samples(trial: Trial) -> None:
    layer = _group_norm(trial)
    trial.mark()
    _run(layer, 2 + trial.at_fault)


@scenario(
    "... later",
    says=differ(
        r"SyncGroupNorm \(.*, N=2, .*, call 3\)", r"the first message of SyncGroupNorm \(.*, N=3"
    ),
    setups=_SETUPS,
)
def samples_later(trial: Trial) -> None:
    layer = _group_norm(trial)
    _run(layer)
    trial.mark()
    _run(layer, 2 + trial.at_fault)


@scenario(
    "another number of groups of a group norm on a rank",
    says=differ("4 channels, N=2, num_groups=2", "2 channels, N=2, num_groups=1", _BUILT),
    setups=_SETUPS,
)
def groups(trial: Trial) -> None:
    trial.mark()
    _run(_group_norm(trial, 2 - trial.at_fault))


@scenario(
    "a rank killed between two group norms",
    says=r"lost the connection in SyncGroupNorm .*: rank 1 .* has ended",
    others_say={"mpi": MPIEXEC, "own": MPIEXEC},
    lost=True,
    setups=_SETUPS,
)
def killed_in_group_norm(trial: Trial) -> None:
    layer = _group_norm(trial)
    _run(layer)
    trial.mark()
    if trial.at_fault:
        kill(trial)
    _run(layer)


@scenario(
    "another clip of a batch renormalization on a rank",
    says=differ("rmax=2.0", "rmax=3.0", "have built SyncBatchRenorm1d differently: "),
    setups=_SETUPS,
)
def renorm_options(trial: Trial) -> None:
    from multibn.torch import SyncBatchRenorm1d

    trial.mark()
    _run(SyncBatchRenorm1d(4, rmax=2.0 + trial.at_fault, process_group=trial.communicator))


@scenario(
    "another shape of a running norm on a rank",
    says=differ(r"RunningNorm\(\(2,\).*", r"RunningNorm\(\(3,\)"),
    setups=_SETUPS,
)
def observations(trial: Trial) -> None:
    from multibn.torch import RunningNorm

    trial.mark()
    RunningNorm(2 + trial.at_fault, process_group=trial.communicator).synchronize()
