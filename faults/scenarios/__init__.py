"""The faults: what each rank does, and what the user must see of it.

A scenario is a function of a `Trial`, which every rank runs; rank 1 is the one at fault. The
function calls `trial.mark()` when the fault is about to happen.
"""

from dataclasses import replace

from faults.scenarios import data, layers, networks, ranks, restarts
from faults.scenarios._scenario import DEADLINE, Scenario

__all__ = ["DEADLINE", "SCENARIOS", "Scenario"]

SCENARIOS = {
    name: replace(fault, name=name)
    for module in (layers, data, restarts, ranks, networks)
    for name, fault in vars(module).items()
    if isinstance(fault, Scenario)
}
