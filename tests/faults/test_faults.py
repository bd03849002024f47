"""Faults of `python -m faults` that take little time, on real processes: what the user sees."""

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from faults import machines
from faults.launch import Job
from faults.outcome import Outcome
from faults.scenarios import SCENARIOS, long_runs
from faults.setups import SETUPS, Setup
from tests.helpers import require

NEEDS = "torch"

pytestmark = pytest.mark.launches

# README's recipes for torch and for Chainer: one over shared memory, the other over MPI.
_RECIPES = ("ddp", "chainermn")
_TOGETHER = [
    *("channels", "dtype", "order_first", "order", "order_of_widths", "sequence", "left_out"),
    *("built", "models", "options", "options_later", "last_left_out", "elsewhere", "deleted"),
    *("layer_in_eval", "network_in_eval", "no_gradient", "recomputed", "empty", "one_value", "nan"),
    *("refused", "diverged", "version", "restart", "restart_pickled", "many_models"),
]
_CASES = [
    (setup, name)
    for setup in _RECIPES
    for name in _TOGETHER
    if SCENARIOS[name].runs_under(SETUPS[setup]) and not SCENARIOS[name].ends_in(SETUPS[setup])
]
_LEAVES = ("samples", "samples_later", "groups", "renorm_options", "observations")
_CASES += [("shared memory", name) for name in _LEAVES]
_CASES_THAT_END = [
    ("ddp", "killed"), ("ddp", "late_first"),
    ("gloo", "killed"), ("gloo", "launcher_killed"), ("gloo", "stopped"), ("gloo", "out_of_data"),
    ("gloo", "exception"), ("gloo", "max_restarts"), ("shared memory", "max_restarts"),
    ("gloo", "killed_in_group_norm"),
    ("chainermn", "out_of_data"), ("chainermn", "exception_plain"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["memory", "fd", "task"])
def test_a_long_run_notices_a_leak(name: str) -> None:
    """Ten of a kind: this process has other things, which may end at any time."""
    before, end = long_runs.held(), threading.Event()
    kept: list[Any] = [np.ones(2**21)] if name == "memory" else []  # 17 MB
    with ExitStack() as stack:
        for _ in range(10):
            if name == "fd":
                stack.enter_context(open(os.devnull))
            elif name == "task":
                kept.append(threading.Thread(target=end.wait))
                kept[-1].start()
        grown = long_runs.growth(before)
        end.set()
    assert re.search(rf"{name} [\d.]+ -> [\d.]+", grown), grown


Outcomes = dict[tuple[str, str], Future[dict[str, Outcome]]]


def _run(setup: str, names: list[str]) -> dict[str, Outcome]:
    job = Job(SETUPS[setup], [SCENARIOS[name] for name in names])
    return {outcome.scenario.name: outcome for outcome in job.run()}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """The outcomes of the selected cases. Two launches run at a time: most of them wait."""
    selected = [
        (item.callspec.params["setup"], item.callspec.params["name"])
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ()) and isinstance(item, pytest.Function)
    ]
    setups = (*_RECIPES, "shared memory")
    jobs = [[case for case in _CASES if case[0] == setup] for setup in setups]
    jobs += [[case] for case in _CASES_THAT_END]
    futures: Outcomes = {}
    with ThreadPoolExecutor(2) as pool:
        for job in jobs:
            cases = [case for case in job if case in selected]
            if cases and require.available(
                SETUPS[cases[0][0]].launcher, SETUPS[cases[0][0]].framework
            ):
                future = pool.submit(_run, cases[0][0], [name for _, name in cases])
                futures |= dict.fromkeys(cases, future)
        yield futures


def _expect(outcome: Outcome) -> None:
    complaint = outcome.complaint(slack=5.0)  # the machine may be busy
    assert not complaint, f"{complaint}\n{outcome.ranks}\n{outcome.output}"


@pytest.mark.alone
@pytest.mark.parametrize("setup, name", [*_CASES, *_CASES_THAT_END])
def test_a_fault_is_seen_in_time_on_every_rank(setup: str, name: str, outcomes: Outcomes) -> None:
    """The message names layers and ranks; where processes end, a rank prints it first."""
    require.need(SETUPS[setup].launcher, SETUPS[setup].framework)
    _expect(outcomes[setup, name].result()[name])


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(
            SETUPS[setup],
            marks=pytest.mark.beside(
                partial(machines.run, SCENARIOS[name], SETUPS[setup]),
                SETUPS[setup].launcher,
                "netns",
            ),
            id=name,
        )
        for setup, name in (("gloo", "partition"), ("mpi", "delay"), ("gloo", "killed_of_four"))
    ],
)
def test_a_fault_between_two_machines_is_told(setup: Setup, beside: Outcome) -> None:
    """A network that fails is named, a slow one borne, and of four ranks the lost one is named."""
    assert beside.setup is setup
    _expect(beside)
