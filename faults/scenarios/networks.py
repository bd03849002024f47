"""Networks between two machines."""

import subprocess
import threading
import time
from typing import Any

from faults.scenarios._scenario import SILENCE, of_rank_1, scenario
from faults.scenarios.ranks import come_late, kill, stop
from faults.trial import Trial


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


_DELAY = 0.005
_STEPS, _MESSAGES = 10, 12  # of a step: six layers, forward and backward


@scenario(
    "a line of 5 ms each way, 120 messages", seconds=5.0, ends=True, per_machine=1, delay=_DELAY
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
def _outage(trial: Trial) -> None:
    _link("down")
    threading.Timer(3.0, _link, ["up"]).start()


outage = of_rank_1(
    "a network that fails for 3 s", _outage, seconds=10.0, ends=True, per_machine=1, deadline=10.0
)

partition = of_rank_1(
    "a network that fails",
    lambda _: _link("down"),
    says=r"rank 0 has waited 3 s in layer1.* for rank\(s\) \[1\]: "
    r"rank 1 \(machine mbnode2, pid \d+\) is on another machine",
    seconds=SILENCE,
    ends=True,
    per_machine=1,
)


# Rank 1 and no other, also where nobody on the machine can look at the processes of rank 1's.
_ONLY_1 = r"rank 1 \(machine mbnode1, pid \d+\) (?!.*rank \d \(machine)"
_OF_FOUR: dict[str, Any] = {"lost": True, "per_machine": 2}
_NOT_THERE: dict[str, Any] = {
    "says": rf"waited 3 s in layer1\.0\.bn1 .* for rank\(s\) \[1\]: {_ONLY_1}",
    "seconds": SILENCE,
    **_OF_FOUR,
}


killed_of_four = of_rank_1(
    "a rank killed, of two on each machine",
    kill,
    says=rf"lost the connection in layer1\.0\.bn1 .*: {_ONLY_1}",
    seconds=2.0,
    setups=("gloo",),
    **_OF_FOUR,
)

stopped_of_four = of_rank_1("a rank stopped, of two on each machine", stop, **_NOT_THERE)

late_of_four = of_rank_1("a rank late, of two on each machine", come_late, **_NOT_THERE)
