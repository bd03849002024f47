"""The faults: what each rank does, and what has to come of it.

A scenario is a function of a `Trial`, which every rank runs; rank 1 is the one at fault. It calls
`trial.mark()` when the fault is about to happen.
"""

from faults.scenarios import data, layers, networks, ranks, restarts
from faults.scenarios._scenario import DEADLINE, Scenario

__all__ = ["DEADLINE", "SCENARIOS"]

SCENARIOS = {
    found.name: found
    for module in (layers, data, restarts, ranks, networks)
    for found in vars(module).values()
    if isinstance(found, Scenario)
}
