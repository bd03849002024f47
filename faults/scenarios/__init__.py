"""The faults: what each rank does, and what the user must see of it.

A scenario is a function of a `Trial`, which every rank runs; rank 1 is the one at fault. The
function calls `trial.mark()` when the fault is about to happen.
"""

from dataclasses import replace

from faults.scenarios import data, layers, leaves, long_runs, networks, ranks, restarts
from faults.scenarios._scenario import DEADLINE, Scenario
from faults.setups import PEERS

__all__ = ["DEADLINE", "SCENARIOS", "Scenario"]

# The faults that are tried without multibn, too.
_BESIDE = (
    *("channels", "dtype", "order", "order_of_widths", "left_out", "layer_in_eval"),
    *("network_in_eval", "no_gradient", "empty", "one_value", "nan", "refused", "restart", "busy"),
    *("out_of_data", "stopped", "killed", "exception", "launcher_killed"),
)
SCENARIOS = {
    name: replace(fault, name=name, setups=fault.setups + PEERS * (name in _BESIDE))
    for module in (layers, leaves, data, restarts, ranks, long_runs, networks)
    for name, fault in vars(module).items()
    if isinstance(fault, Scenario)
}
