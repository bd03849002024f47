"""The faults: what each rank does, and what has to come of it.

A scenario is a function of a `Trial`, which every rank runs; rank 1 is the one at fault. It calls
`trial.mark()` when the fault is about to happen.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faults.models import CHANNELS, batch

DEADLINE = 3.0  # seconds, MULTIBN_TIMEOUT of every scenario
SAMPLES = 4  # of each rank in a step


class Trial:
    """One scenario on one rank."""

    def __init__(self, world: Any, communicator: Any, mark: Callable[[], None]) -> None:
        self.rank, self.size = world.rank, world.size
        self.at_fault = self.rank == 1
        self.communicator = communicator
        self.mark = mark
        self._world = world
        self.build()

    def build(self, channels: int = CHANNELS) -> None:
        world = self._world
        self.trainee = world.trainee(
            world.trainee.make(world.make_norm, self.communicator, channels)
        )
        self._taken: list[Sequence[int]] = []
        self._gradient = np.zeros(0)

    def warm_up(self) -> None:
        """Compile what will be needed."""
        for single in (False, True):
            alone = self._world.trainee(
                self._world.trainee.make(self._world.make_norm, self._world.alone, CHANNELS)
            )
            if single:
                alone.single_precision()
            alone.network.recomputes = single
            alone.step(batch(0, 0, SAMPLES))

    def step(
        self, counts: Sequence[int] = (), *, spoil: float = 0.0, backward: bool = True
    ) -> None:
        """A training step; `counts` are the ranks' samples, `spoil` is added to one number."""
        counts = counts or [SAMPLES] * self.size
        x = batch(len(self._taken), self.rank, counts[self.rank])
        if spoil:
            x[-1, -1] += spoil
        self._taken.append(counts)
        self._gradient = self.trainee.step(x, backward=backward)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def error(self) -> float:
        """Largest difference of statistics and gradient from one process with all the samples."""
        world = self._world
        oracle = world.trainee(world.trainee.make(world.make_norm, world.alone, CHANNELS))
        gradient = np.zeros(0)
        for i, counts in enumerate(self._taken):
            gradient = oracle.step(np.concatenate([batch(i, r, n) for r, n in enumerate(counts)]))
        differences = [self.trainee.statistics() - oracle.statistics()]
        if self._taken:
            start = sum(self._taken[-1][: self.rank])
            mine = gradient[start : start + self._taken[-1][self.rank]]
            differences.append((self._gradient - mine).ravel())
        return float(np.abs(np.concatenate(differences)).max(initial=0.0))


@dataclass(frozen=True)
class Scenario:
    """A fault.

    Attributes
    ----------
    run
        What every rank does.
    what
        The fault, for people.
    says
        What the error must say, a regular expression; "" if the fault must do no harm.
    seconds
        How long after `mark` the last rank may end, errors included.
    spared
        Whether rank 1 needs no error of its own.
    ends
        Whether it ends processes, and so needs a launch of its own.
    frameworks, over
        Where it can happen.
    plain
        Whether MPI's program is started without `-m mpi4py`.
    today
        Whether the peers are shown beside it.
    hosts
        Whether it takes two hosts, with a rank on each.
    deadline
        MULTIBN_TIMEOUT.
    """

    run: Callable[[Trial], None]
    what: str
    says: str = ""
    seconds: float = 1.0
    spared: bool = False
    ends: bool = False
    frameworks: tuple[str, ...] = ("torch", "chainer")
    over: tuple[str, ...] = ("gloo", "mpi")
    plain: bool = False
    today: bool = True
    hosts: bool = False
    deadline: float = DEADLINE
    name: str = field(default="")


SCENARIOS: dict[str, Scenario] = {}


def scenario(what: str, **options: Any) -> Callable[[Callable[[Trial], None]], Any]:
    """Enter a function into the list of faults."""

    def enter(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        SCENARIOS[run.__name__] = Scenario(run, what, name=run.__name__, **options)
        return run

    return enter


# Layers that differ.

_PLACES = r"the ranks are in different places: "
_SILENCE = DEADLINE + 1.0


@scenario(
    "another number of channels on a rank",
    says=r"have built layer1\.0\.bn1 differently: rank\(s\) \[0, 2\] in 4 channels; "
    r"rank\(s\) \[1\] in 5 channels",
)
def channels(trial: Trial) -> None:
    trial.build(CHANNELS + trial.at_fault)
    trial.mark()
    trial.steps(2)


@scenario(
    "another dtype on a rank",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\); "
    r"rank\(s\) \[1\] in layer1\.0\.bn1 \(forward, float32, call 1\)",
)
def dtype(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        trial.trainee.single_precision()
    trial.steps(2)


def _swap(trial: Trial) -> None:
    trial.trainee.network.layer1[0].swapped = trial.at_fault


def _skip(trial: Trial) -> None:
    trial.trainee.network.layer1[0].skipped = trial.at_fault


@scenario(
    "two layers in another order on a rank, first step",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1; rank\(s\) \[1\] in layer1\.0\.bn2",
)
def order_first(trial: Trial) -> None:
    _swap(trial)
    trial.mark()
    trial.steps(2)


@scenario(
    "... later",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\); "
    r"rank\(s\) \[1\] in layer1\.0\.bn2",
)
def order(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    _swap(trial)
    trial.steps(2)


@scenario(
    "a layer left out on a rank, first step",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn2; rank\(s\) \[1\] in layer1\.1\.bn1",
)
def left_out_first(trial: Trial) -> None:
    _skip(trial)
    trial.mark()
    trial.steps(2)


@scenario(
    "... later",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn2 .*rank\(s\) \[1\] in layer1\.1\.bn1",
)
def left_out(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    _skip(trial)
    trial.steps(2)


@scenario(
    "a layer in evaluation on a rank",
    says=_PLACES + r".*layer1\.0\.bn1 .*layer1\.0\.bn2",
)
def layer_in_eval(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        trial.trainee.evaluate_layer()
    trial.steps(2)


@scenario(
    "the network in evaluation on a rank",
    says=r"waited 3 s in layer1\.0\.bn1 \(forward.*for rank\(s\) \[1\]: rank 1 .* is running",
    seconds=_SILENCE,
    spared=True,
)
def network_in_eval(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        trial.trainee.evaluate()
    trial.steps(2)


@scenario(
    "no gradient wanted on a rank",
    says=_PLACES + r".*layer2\.0\.bn2 \(backward.*layer1\.0\.bn1 \(forward",
)
def no_gradient(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    for _ in range(2):
        trial.step(backward=not trial.at_fault)


@scenario(
    "a backward pass that recomputes on one rank only",
    says=_PLACES + r".*layer1\.1\.bn2 \(backward.*layer1\.0\.bn1 \(forward",
    frameworks=("torch",),
)
def recomputed(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.trainee.network.recomputes = trial.at_fault
    trial.steps(2)


# Data that differ.


@scenario("an empty batch on a rank")
def empty(trial: Trial) -> None:
    trial.mark()
    for _ in range(3):
        trial.step([SAMPLES, 0, SAMPLES])


@scenario(
    "one sample on all ranks together",
    says=r"needs more than 1 value per channel over all ranks together: got 1 on 3 rank\(s\)",
)
def one_value(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.step([0, 1, 0])


_NON_FINITE = (
    r"statistics of layer1\.0\.bn1 are not finite: .* on rank\(s\) \[1\] of 3\. "
    r"Look for what made them"
)


@scenario("NaN in the input of a rank", says=_NON_FINITE)
def nan(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.step(spoil=float("nan") if trial.at_fault else 0.0)
    trial.step()


@scenario("infinity in the input of a rank", says=_NON_FINITE)
def infinity(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.step(spoil=float("inf") if trial.at_fault else 0.0)
    trial.step()


@scenario(
    "an input that does not fit on a rank",
    says=r"the input of layer1\.0\.bn1 was refused on rank\(s\) \[1\] of 3|must have 4 channels",
)
def refused(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.trainee.network.embeds = not trial.at_fault
    trial.steps(2)


@scenario(
    "statistics changed on a rank, then check_sync",
    says=r"1 of \d+ arrays are not the same on all 3 ranks.*by up to 0\.001 on rank 1",
    today=False,
)
def diverged(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    norm = trial.trainee.norms()[0]
    average = norm.running_mean if hasattr(norm, "running_mean") else norm.avg_mean
    if trial.at_fault:
        average[0] += 1e-3
    if hasattr(norm, "running_mean"):
        from multibn.torch_backend import check_sync
    else:
        from multibn.chainer_backend import check_sync  # type: ignore[assignment]
    check_sync(trial.trainee.network, trial.communicator)


@scenario(
    "another version of the library on a rank",
    says=r"the ranks must run the same version of multibn: rank\(s\) \[0, 2\] in \d.*; "
    r"rank\(s\) \[1\] in 0\.0\.1",
    today=False,
)
def version(trial: Trial) -> None:
    from multibn.communicators import checked

    own = checked._version
    trial.mark()
    try:
        if trial.at_fault:
            checked._version = lambda: "0.0.1"  # type: ignore[assignment]
        trial.steps(2)
    finally:
        checked._version = own


# Ranks that do not come.


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
    seconds=_SILENCE,
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
    seconds=_SILENCE,
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
    seconds=_SILENCE,
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


# Networks.


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


# TCP tries again after 0.2, 0.4, 0.8, 1.6, 3.2... s.
@scenario("a network that fails for 3 s", seconds=10.0, ends=True, hosts=True, deadline=10.0)
def outage(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        _link("down")
        threading.Timer(3.0, _link, ["up"]).start()
    trial.steps(20)


@scenario(
    "a network that fails",
    says=r"rank 0 has waited 3 s in layer1.* for rank\(s\) \[1\]: "
    r"rank 1 \(host mbhost2, pid \d+\) is on another host",
    seconds=_SILENCE,
    ends=True,
    hosts=True,
)
def partition(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        _link("down")
    trial.steps(2)
