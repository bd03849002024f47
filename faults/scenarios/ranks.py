"""Ranks that do not come, and launchers."""

import os
import signal
import sys
import time

from faults.scenarios._scenario import DEADLINE, SILENCE, scenario
from faults.trial import Trial

# Under DistributedDataParallel processes end as without, and with ChainerMN as over MPI.
_EACH_TRANSPORT = ("shared memory", "gloo", "mpi", "own")


@scenario("a rank late by less than the deadline", seconds=3.0, also_run_on_peers=False)
def late(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        time.sleep(1.0)
    trial.steps(2)


@scenario(
    "a rank late by more than the deadline",
    says=r"waited 3 s in layer1\.0\.bn1 \(forward, float64, call 3\) for rank\(s\) \[1\]: "
    r"rank 1 \(machine .*, pid \d+\) is running, last seen \d\.\d s ago in layer1\.0\.bn1 \(back",
    seconds=SILENCE,
    needs="has_deadline",
    faulty_rank_may_be_silent=True,
)
def busy(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        time.sleep(DEADLINE)
        return
    trial.steps(2)


_FIRST = r"waited \d+ s in the first message of "
# Before the first message over MPI, a rank that waits cannot tell the others so: they are named,
# too.
_MISSING = r".* for rank\(s\) \[(0, )?1(, 2)?\]: no rank was heard of before"


@scenario(
    "... at the first step",
    says=_FIRST + r"layer1\.0\.bn1 \(forward" + _MISSING,
    # The ranks meet before the first forward pass.
    says_under={"ddp": _FIRST + r"DistributedDataParallel \(before forward" + _MISSING},
    seconds=SILENCE,
    needs="has_deadline",
    faulty_rank_may_be_silent=True,
    ends=True,
    also_run_on_peers=False,
)
def late_first(trial: Trial) -> None:
    trial.build()
    trial.mark()
    if trial.at_fault:
        time.sleep(DEADLINE + 2)
    trial.steps(2)


@scenario(
    "a rank that ends before its first layer",
    says=r"for rank\(s\) \[1\], whose process has ended before its first layer",
    # MPI tells of no rank that ends in order.
    says_under=dict.fromkeys(("mpi", "chainermn"), _FIRST + r"layer1\.0\.bn1 \(forward" + _MISSING),
    deadline=20.0,  # a process with torch takes seconds to end on a busy machine
    seconds=21.0,
    needs="has_deadline",
    faulty_rank_may_be_silent=True,
    ends=True,
    also_run_on_peers=False,
)
def ends_first(trial: Trial) -> None:
    trial.build()
    trial.mark()
    trial.steps(0 if trial.at_fault else 2)


@scenario(
    "pipeline stages that share the default group, of which one has no layer",
    says=_FIRST + r"layer1\.0\.bn1 \(forward" + _MISSING,
    seconds=SILENCE,
    needs="has_deadline",
    faulty_rank_may_be_silent=True,
    ends=True,
    setups=("shared memory", "gloo", "mpi"),
    also_run_on_peers=False,
)
def pipeline(trial: Trial) -> None:
    if trial.at_fault:
        trial.mark()
        time.sleep(60)  # for what the other stages would send
    trial.build(communicator=trial.everybody)
    trial.mark()
    trial.steps(2)


_LEFT = r"in layer1\.0\.bn1 .* for rank\(s\) \[1\], whose program ended before"


@scenario(
    "a rank out of data, which ends",
    says=_LEFT,
    needs="has_notices",
    faulty_rank_may_be_silent=True,
    ends=True,
)
def out_of_data(trial: Trial) -> None:
    trial.begin()
    trial.steps(0 if trial.at_fault else 2)


@scenario(
    "a rank stopped (SIGSTOP)",
    says=r"waited 3 s in layer1\.0\.bn1 .* for rank\(s\) \[1\]: .* is stopped",
    seconds=SILENCE,
    needs="has_deadline",
    faulty_rank_may_be_silent=True,
    ends=True,
    setups=("shared memory", "gloo", "mpi"),
)
def stopped(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        os.kill(os.getpid(), signal.SIGSTOP)
    trial.steps(2)


_LOST = r"lost the connection in layer1\.0\.bn1 .*: rank 1 .* has ended"
# mpiexec sees it before the other ranks do, and ends them.
_MPIEXEC = r"rank 1 .*signal 9"


@scenario(
    "a rank killed (SIGKILL)",
    says=_LOST,
    others_say={"mpi": _MPIEXEC, "chainermn": _MPIEXEC, "own": _MPIEXEC},
    faulty_rank_may_be_silent=True,
    ends=True,
)
def killed(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        os.kill(os.getpid(), signal.SIGKILL)
    trial.steps(2)


class OwnError(Exception):
    """What a user's program raises."""


def _raise(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        raise OwnError("of this rank alone")
    trial.steps(2)


@scenario(
    "an exception on a rank",
    says=r"OwnError: of this rank alone",
    faulty_rank_may_be_silent=True,
    ends=True,
    setups=_EACH_TRANSPORT,
)
def exception(trial: Trial) -> None:
    _raise(trial)


@scenario(
    "... without -m mpi4py",
    says=r"OwnError: of this rank alone",
    needs="has_notices",
    faulty_rank_may_be_silent=True,
    ends=True,
    without_mpi4py=True,
    setups=("mpi", "chainermn", "own"),
)
def exception_plain(trial: Trial) -> None:
    _raise(trial)


@scenario(
    "sys.exit(0) on a rank",
    says=_LEFT,
    needs="has_notices",
    faulty_rank_may_be_silent=True,
    ends=True,
    setups=("mpi",),
    also_run_on_peers=False,
)
def exit_0(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        sys.exit(0)
    trial.steps(2)


_ORPHANED = r"the launcher of rank \d .*has ended"
_PMIX = r"error occurred in PMIx Event Notification"


@scenario(
    "the launcher killed",
    says=_ORPHANED,
    # Open MPI ends its processes, too, now and then before a layer is called.
    says_under={"mpi": f"{_ORPHANED}|{_PMIX}"},
    others_say={"own": _PMIX},
    seconds=SILENCE,
    ends=True,
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


@scenario(
    "the process group not destroyed at the end",
    ends=True,
    setups=("shared memory", "gloo"),
    seconds=5.0,
    also_run_on_peers=False,
)
def not_destroyed(trial: Trial) -> None:
    trial.build()
    trial.mark()
    trial.steps(3)
