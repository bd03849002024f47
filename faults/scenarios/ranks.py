"""Ranks that do not come, and launchers."""

import os
import signal
import sys
import time

from faults.scenarios._scenario import DEADLINE, SILENCE, scenario
from faults.trial import Trial


@scenario("a rank late by less than the deadline", seconds=3.0, today=False)
def late(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        time.sleep(1.0)
    trial.steps(2)


@scenario(
    "a rank busy elsewhere",
    says=r"waited 3 s in layer1\.0\.bn1 \(forward, float64, call 3\) for rank\(s\) \[1\]: "
    r"rank 1 \(host .*, pid \d+\) is running, last seen \d\.\d s ago in layer1\.0\.bn1 \(backward",
    seconds=SILENCE,
    spared=True,
)
def busy(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        time.sleep(DEADLINE + 2)
        return
    trial.steps(2)


_LEFT = r"in layer1\.0\.bn1 .* for rank\(s\) \[1\], whose program ended before"


@scenario("a rank out of data, which ends", says=_LEFT, spared=True, ends=True)
def out_of_data(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.steps(0 if trial.at_fault else 2)


@scenario(
    "a rank stopped (SIGSTOP)",
    says=r"waited 3 s in layer1\.0\.bn1 .* for rank\(s\) \[1\]: .* is stopped",
    seconds=SILENCE,
    spared=True,
    ends=True,
)
def stopped(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        os.kill(os.getpid(), signal.SIGSTOP)
    trial.steps(2)


@scenario(
    "a rank killed (SIGKILL)",
    # mpiexec sees it first, ends the others, and says so itself.
    says=r"lost the connection in layer1\.0\.bn1 .*: rank 1 .* has ended|rank 1 .*signal 9",
    spared=True,
    ends=True,
)
def killed(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        os.kill(os.getpid(), signal.SIGKILL)
    trial.steps(2)


class OwnError(Exception):
    """What a user's program raises."""


def _raise(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        raise OwnError("of this rank alone")
    trial.steps(2)


@scenario("an exception on a rank", says=r"OwnError: of this rank alone", ends=True, spared=True)
def exception(trial: Trial) -> None:
    _raise(trial)


@scenario(
    "... without -m mpi4py",
    says=r"OwnError: of this rank alone",
    ends=True,
    spared=True,
    plain=True,
    over=("mpi",),
)
def exception_plain(trial: Trial) -> None:
    _raise(trial)


@scenario("sys.exit(0) on a rank", says=_LEFT, ends=True, spared=True)
def exit_0(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        sys.exit(0)
    trial.steps(2)


@scenario(
    "the launcher killed",
    says=r"the launcher of rank \d .*has ended",
    seconds=SILENCE,
    ends=True,
)
def launcher_killed(trial: Trial) -> None:
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
    over=("gloo",),
    seconds=5.0,
    today=False,
)
def not_destroyed(trial: Trial) -> None:
    trial.mark()
    trial.steps(3)
