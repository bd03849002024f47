"""The parts of the report: which faults are tried in which setups."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from faults import machines
from faults.launch import Job
from faults.outcome import Outcome
from faults.scenarios import SCENARIOS
from faults.setups import OURS, PEERS, SETUPS

# Jobs wait more than they compute.
_AT_ONCE = 3


def _jobs(name: str, chosen: Sequence[str]) -> list[Job]:
    """The scenarios of a setup: those that end processes alone, the others in two launches."""
    setup = SETUPS[name]
    tried = [SCENARIOS[n] for n in chosen if SCENARIOS[n].runs_under(setup)]
    alone = [s.name for s in tried if s.ends_in(setup) or s.waits_in(setup)]
    together = [s.name for s in tried if s.name not in alone]
    # A peer that hangs is launched again for the scenarios that are left.
    half = (len(together) + 1) // 2 if setup.beside else len(together)
    parts = [together[:half], together[half:], *([n] for n in alone)]
    return [Job(name, names) for names in parts if names]


def _outcomes(setups: Iterable[str], chosen: Sequence[str]) -> Iterator[Outcome]:
    jobs = [job for name in setups for job in _jobs(name, chosen)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for outcomes in pool.map(lambda job: list(job.run()), jobs):
            yield from outcomes


# What becomes of the chosen scenarios: in the setups of multibn's, with other libraries' layers,
# and across two network namespaces.
PARTS: dict[str, Callable[[Sequence[str]], Iterator[Outcome]]] = {
    "multibn": partial(_outcomes, OURS),
    "peers": partial(_outcomes, PEERS),
    "two machines": machines.outcomes,
}


def row(outcome: Outcome) -> dict[str, Any]:
    """What the results keep of an outcome."""
    is_peer = bool(outcome.setup.beside)
    return {
        "scenario": outcome.scenario,
        "setup": outcome.setup.name,
        "seen": outcome.seen[:600],
        "seconds": round(outcome.seconds, 2),
        "verdict": outcome.peer_verdict() if is_peer else outcome.verdict(),
        "complaint": "" if is_peer else outcome.complaint(),
    }
