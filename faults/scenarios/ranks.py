"""Ranks that do not come, and launchers."""

import os
import signal
import sys
import time

from faults.scenarios._scenario import DEADLINE, SILENCE, of_rank_1, scenario
from faults.trial import Trial

# Under DistributedDataParallel processes end as without, and with ChainerMN as over MPI.
_EACH_TRANSPORT = ("shared memory", "gloo", "mpi", "own")


_OWN_ERROR = "of this rank alone"


class OwnError(Exception):
    """What a user's program raises."""


def kill(trial: Trial) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trial: Trial) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(trial: Trial) -> None:
    raise OwnError(_OWN_ERROR)


def come_late(trial: Trial) -> None:
    time.sleep(DEADLINE + 2)


late = of_rank_1("a rank late by less than the deadline", lambda _: time.sleep(1.0), seconds=3.0)

busy = of_rank_1(
    "a rank late by more than the deadline",
    lambda _: time.sleep(DEADLINE),
    says=r"waited 3 s in layer1\.0\.bn1 \(forward, float64, call 3\) for rank\(s\) \[1\]: "
    r"rank 1 \(machine .*, pid \d+\) is running, last seen \d\.\d s ago in layer1\.0\.bn1 \(back",
    then=0,
    seconds=SILENCE,
    own_waits=True,
)

late_and_told = of_rank_1(
    "a rank late by 21 s, of which the others print a line after 20 s",
    lambda _: time.sleep(21.0),
    prints=r"^multibn: rank [02] has waited 20 s in layer1\.0\.bn1 .* for rank\(s\) \[1\]",
    deadline=60.0,
    seconds=30.0,
    ends=True,
    setups=("shared memory", "gloo", "ddp", "mpi", "chainermn"),  # a user's class has no such line
)

_FIRST = r"waited \d+ s in the first message of "
# Before the first message over MPI, a rank that waits cannot tell the others so: they are named,
# too.
_MISSING = r".* for rank\(s\) \[(0, )?1(, 2)?\]: no rank of the group has connected yet"
_NOT_FIRST = _FIRST + r"layer1\.0\.bn1 \(forward" + _MISSING


late_first = of_rank_1(
    "... at the first step",
    come_late,
    says=_NOT_FIRST,
    first=True,
    seconds=SILENCE,
    own_waits=True,
    lost=True,
)

ends_first = of_rank_1(
    "a rank that ends before its first layer",
    says=_NOT_FIRST,
    first=True,
    then=0,
    seconds=SILENCE,
    own_waits=True,
    lost=True,
)


@scenario(
    "pipeline stages that share the default group, of which one has no layer",
    says=_NOT_FIRST,
    seconds=SILENCE,
    lost=True,
    setups=("shared memory", "gloo", "mpi"),
)
def pipeline(trial: Trial) -> None:
    if trial.at_fault:
        trial.mark()
        time.sleep(60)  # for what the other stages would send
    trial.build(communicator=trial.everybody)
    trial.mark()
    trial.steps(2)


_LEFT = r"in layer1\.0\.bn1 .* for rank\(s\) \[1\], which have already exited or left the group"


out_of_data = of_rank_1(
    "a rank out of data, which ends", says=_LEFT, then=0, own_waits=True, lost=True
)

stopped = of_rank_1(
    "a rank stopped (SIGSTOP)",
    stop,
    says=r"waited 3 s in layer1\.0\.bn1 .* for rank\(s\) \[1\]: .* is stopped",
    seconds=SILENCE,
    lost=True,
    setups=("shared memory", "gloo", "mpi"),
)


# mpiexec sees it before the other ranks do, and ends them.
MPIEXEC = r"rank 1 .*signal 9"


killed = of_rank_1(
    "a rank killed (SIGKILL)",
    kill,
    says=r"lost the connection in layer1\.0\.bn1 .*: rank 1 .* has ended",
    others_say={"mpi": MPIEXEC, "chainermn": MPIEXEC, "own": MPIEXEC},
    lost=True,
)

exception = of_rank_1(
    "an exception on a rank",
    _raise,
    says=f"OwnError: {_OWN_ERROR}",
    lost=True,
    setups=_EACH_TRANSPORT,
)

exception_plain = of_rank_1(
    "... without -m mpi4py",
    _raise,
    says=f"OwnError: {_OWN_ERROR}",
    own_waits=True,
    lost=True,
    without_mpi4py=True,
    setups=("mpi", "chainermn", "own", "ChainerMN's link"),
)

exit_0 = of_rank_1(
    "sys.exit(0) on a rank",
    lambda _: sys.exit(0),
    says=_LEFT,
    lost=True,
    setups=("mpi",),
)


@scenario(
    "... after its last link, before the optimizer's allreduce",
    waits_under=("chainermn",),
    lost=True,
    setups=("chainermn",),
)
def exit_0_after_last_link(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        sys.exit(0)
    trial.communicator.multi_node_mean_grad(trial.trainee.model)


_PMIX = r"error occurred in PMIx Event Notification"


@scenario(
    "the launcher killed",
    others_say={"mpi": _PMIX, "own": _PMIX},  # Open MPI ends its processes
    seconds=20.0,  # 60 steps
    ends=True,
    exit_status=-signal.SIGKILL,
    setups=_EACH_TRANSPORT,
)
def launcher_killed(trial: Trial) -> None:
    trial.build()
    trial.steps(2)
    if trial.at_fault:
        os.kill(os.getppid(), signal.SIGKILL)
    trial.mark()
    for _ in range(60):
        trial.step()
        time.sleep(0.1)


not_destroyed = of_rank_1(
    "the process group not destroyed at the end",
    first=True,
    seconds=5.0,
    ends=True,
    setups=("shared memory", "gloo"),
)
