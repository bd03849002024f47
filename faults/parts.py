"""The parts of the report: which faults are tried in which setups."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults import machines
from faults.launch import Job
from faults.outcome import Outcome
from faults.scenarios import SCENARIOS
from faults.setups import OURS, PEERS, SETUPS

Row = dict[str, Any]

# Jobs wait more than they compute.
_AT_ONCE = 3


chosen: list[str] = list(SCENARIOS)  # what is tried on one machine


def _jobs(name: str) -> list[Job]:
    """The scenarios of a setup: those that end processes alone, the others in two launches."""
    setup = SETUPS[name]
    tried = [SCENARIOS[n] for n in chosen if SCENARIOS[n].runs_under(setup)]
    alone = [s.name for s in tried if s.ends_in(setup) or s.waits_in(setup)]
    together = [s.name for s in tried if s.name not in alone]
    # A peer that hangs is launched again for the scenarios that are left.
    half = (len(together) + 1) // 2 if setup.beside else len(together)
    parts = [together[:half], together[half:], *([n] for n in alone)]
    return [Job(name, names) for names in parts if names]


def multibn(show: Callable[[Row], None]) -> list[Row]:
    """Every fault in every setup of multibn's."""
    return _shown(map(_row, _outcomes(OURS)), show)


def peers(show: Callable[[Row], None]) -> list[Row]:
    """The same with other libraries' layers."""
    outcomes = _outcomes(PEERS)
    rows = (_row(o) | {"complaint": "", "verdict": o.peer_verdict()} for o in outcomes)
    return _shown(rows, show)


def _outcomes(setups: Iterable[str]) -> Iterator[Outcome]:
    jobs = [job for name in setups for job in _jobs(name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for outcomes in pool.map(lambda job: list(job.run()), jobs):
            yield from outcomes


def two_machines(show: Callable[[Row], None]) -> list[Row]:
    """Across two network namespaces."""
    return _shown(machines.rows(chosen), show)


PARTS: dict[str, Callable[[Callable[[Row], None]], list[Row]]] = {
    "multibn": multibn,
    "peers": peers,
    "two machines": two_machines,
}


def _shown(rows: Iterable[Row], show: Callable[[Row], None]) -> list[Row]:
    shown = []
    for row in rows:
        show(row)
        shown.append(row)
    return shown


def _row(outcome: Outcome) -> Row:
    return {
        "scenario": outcome.scenario,
        "setup": outcome.setup.name,
        "seen": outcome.seen[:600],
        "seconds": round(outcome.seconds, 2),
        "verdict": outcome.verdict(),
        "ranks": [r.how for r in outcome.ranks],
        "exit_status": outcome.exit_status,
        "complaint": outcome.complaint(),
    }
