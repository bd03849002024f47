"""Networks between two machines."""

import os
import signal
import subprocess
import threading
import time
from typing import Any

from faults.scenarios._scenario import DEADLINE, SILENCE, scenario
from faults.trial import Trial


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


_DELAY = 0.005
_STEPS, _MESSAGES = 10, 12  # of a step: six layers, forward and backward


@scenario(
    "a line of 5 ms each way, 120 messages", seconds=5.0, ends=True, two_machines=True, delay=_DELAY
)
def delay(trial: Trial) -> None:
    trial.begin()
    start = time.monotonic()
    trial.steps(_STEPS)
    # A sum needs the numbers of both ranks: a message takes the delay of one way at least.
    needed = _STEPS * _MESSAGES * _DELAY
    if (took := time.monotonic() - start) < needed:
        raise AssertionError(f"the line has no delay: {took:.3f} s, and {needed:.3f} s at least")


# TCP tries again after 0.2, 0.4, 0.8, 1.6, 3.2... s.
@scenario("a network that fails for 3 s", seconds=10.0, ends=True, two_machines=True, deadline=10.0)
def outage(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        _link("down")
        threading.Timer(3.0, _link, ["up"]).start()
    trial.steps(20)


@scenario(
    "a network that fails",
    says=r"rank 0 has waited 3 s in layer1.* for rank\(s\) \[1\]: "
    r"rank 1 \(machine mbnode2, pid \d+\) is on another machine",
    seconds=SILENCE,
    ends=True,
    two_machines=True,
)
def partition(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        _link("down")
    trial.steps(2)


# Rank 1 and no other, also where nobody on the machine can look at the processes of rank 1's.
_ONLY_1 = r"rank 1 \(machine mbnode1, pid \d+\) (?!.*rank \d \(machine)"


@scenario(
    "a rank killed, of two on each machine",
    says=rf"lost the connection in layer1\.0\.bn1 .*: {_ONLY_1}",
    seconds=2.0,
    faulty_rank_may_be_silent=True,
    ends=True,
    two_machines=True,
    per_machine=2,
    setups=("gloo",),
)
def killed_of_four(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        os.kill(os.getpid(), signal.SIGKILL)
    trial.steps(2)


_NOT_THERE: dict[str, Any] = {
    "says": rf"waited 3 s in layer1\.0\.bn1 .* for rank\(s\) \[1\]: {_ONLY_1}",
    "seconds": SILENCE,
    "faulty_rank_may_be_silent": True,
    "ends": True,
    "two_machines": True,
    "per_machine": 2,
}


@scenario(
    "a rank stopped, of two on each machine",
    **_NOT_THERE,
)
def stopped_of_four(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        os.kill(os.getpid(), signal.SIGSTOP)
    trial.steps(2)


@scenario(
    "a rank late, of two on each machine",
    **_NOT_THERE,
)
def late_of_four(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        time.sleep(DEADLINE + 2)
    trial.steps(2)
