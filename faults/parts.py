"""The parts of the report: which faults are tried over what."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults import hosts
from faults.launch import Job, Outcome
from faults.scenarios import SCENARIOS
from multibn._launch import LAUNCHERS, run_workers

Row = dict[str, Any]

OVER = ("gloo", "mpi")
FRAMEWORKS = ("torch", "chainer")
# Beside multibn over gloo in torch, and over MPI in Chainer.
PEERS = (("gloo", "torch"), ("mpi", "chainer"))


def _jobs(library: str, over: str, framework: str) -> list[Job]:
    chosen = [
        s
        for s in SCENARIOS.values()
        if not s.hosts
        and over in s.over
        and framework in s.frameworks
        and (library == "multibn" or s.today)
    ]
    together = [s.name for s in chosen if not s.ends]
    # How processes end depends on torch or Chainer in nothing.
    ends = (over, framework) != ("gloo", "chainer")
    alone = [[s.name] for s in chosen if s.ends and ends]
    return [Job(library, over, framework, names) for names in [together, *alone]]


def multibn(show: Callable[[Row], None]) -> list[Row]:
    """Every fault over every transport in both frameworks."""
    jobs = [job for o in OVER for f in FRAMEWORKS for job in _jobs("multibn", o, f)]
    return _shown((_row(outcome) for outcome in _outcomes(jobs, at_once=2)), show)


def today(show: Callable[[Row], None]) -> list[Row]:
    """The same over the peers, which wait more than they compute."""
    jobs = []
    for over, framework in PEERS:
        for job in _jobs("today", over, framework):
            half = (len(job.scenarios) + 1) // 2
            parts = [job.scenarios[:half], job.scenarios[half:]]
            jobs += [Job("today", over, framework, part) for part in parts if part]
    outcomes = _outcomes(jobs, at_once=4)
    return _shown((_row(o) | {"complaint": "", "today": o.today()} for o in outcomes), show)


def _outcomes(jobs: list[Job], *, at_once: int) -> Iterator[Outcome]:
    """What becomes of them, in their order; so many at once, as most of the time is waiting."""
    with ThreadPoolExecutor(at_once) as pool:
        for outcomes in pool.map(lambda job: list(job.run()), jobs):
            yield from outcomes


def two_hosts(show: Callable[[Row], None]) -> list[Row]:
    """Across two network namespaces."""
    return _shown(hosts.rows(), show)


def cost(show: Callable[[Row], None]) -> list[Row]:
    """What the checks cost in a step of a network like ResNet-50 on 2 ranks."""
    rows = []
    for over in OVER:
        worker = ["-m", "faults.cost", over, "25"]  # seconds
        written = run_workers(f"cost over {over}", LAUNCHERS[over], 2, worker, timeout=240.0)
        notes = written[0].notes
        # What the messages take more, alone, is the surer number on a machine that is not quiet.
        complaint = "more than 2 % of the step" * (notes["messages_extra"] > 0.02)
        rows.append({"over": over, "seconds": 1e-3 * notes["checked_ms"],
                     "seen": f"{100 * notes['messages_extra']:.2f} % of the step",
                     "complaint": complaint, **notes})  # fmt: skip
    return _shown(rows, show)


PARTS: dict[str, Callable[[Callable[[Row], None]], list[Row]]] = {
    "multibn": multibn,
    "today": today,
    "two hosts": two_hosts,
    "cost": cost,
}


def _shown(rows: Iterable[Row], show: Callable[[Row], None]) -> list[Row]:
    found = []
    for row in rows:
        show(row)
        found.append(row)
    return found


def _row(outcome: Outcome) -> Row:
    return {
        "scenario": outcome.scenario,
        "over": outcome.over,
        "framework": outcome.framework,
        "seen": outcome.seen[:600],
        "seconds": round(outcome.seconds, 2),
        "ranks": [r.how for r in outcome.ranks],
        "exit_status": outcome.exit_status,
        "complaint": outcome.complaint(),
    }
