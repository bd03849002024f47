"""Faults of `python -m faults` that take little time, on real processes: what the user sees."""

import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from multibn._launch import environment
from tests.helpers import require

require.need("torch")

from faults import machines  # noqa: E402
from faults.launch import Job  # noqa: E402
from faults.outcome import Outcome  # noqa: E402
from faults.scenarios import SCENARIOS  # noqa: E402
from faults.setups import SETUPS  # noqa: E402

pytestmark = pytest.mark.launches

# README's recipes for torch and for Chainer: one over shared memory, the other over MPI.
_RECIPES = ("ddp", "chainermn")
_TOGETHER = [
    *("channels", "dtype", "order_first", "order", "order_of_widths", "sequence", "left_out"),
    *("models_first", "models", "options"),
    *("layer_in_eval", "network_in_eval", "no_gradient", "recomputed", "empty", "one_value", "nan"),
    *("refused", "diverged", "version", "restart", "restart_pickled"),
]
_CASES = [
    (setup, name)
    for setup in _RECIPES
    for name in _TOGETHER
    if SCENARIOS[name].runs_under(SETUPS[setup]) and not SCENARIOS[name].ends_in(SETUPS[setup])
]
_CASES_THAT_END = [
    ("ddp", "killed"), ("gloo", "killed"), ("gloo", "launcher_killed"), ("gloo", "stopped"),
    ("gloo", "out_of_data"), ("gloo", "exception"),
    ("chainermn", "out_of_data"), ("chainermn", "exception_plain"),
]  # fmt: skip
Outcomes = dict[tuple[str, str], Future[dict[str, Outcome]]]


def _need(setup: str) -> None:
    require.need(SETUPS[setup].launcher, SETUPS[setup].framework)


def _run(setup: str, names: list[str]) -> dict[str, Outcome]:
    return {outcome.scenario: outcome for outcome in Job(setup, names).run()}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """Of the selected cases, by setup and name. Two launches run at a time: most of them wait."""
    selected = [
        (item.callspec.params["setup"], item.callspec.params["name"])
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ()) and isinstance(item, pytest.Function)
    ]
    jobs = [[case for case in _CASES if case[0] == setup] for setup in _RECIPES]
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
@pytest.mark.parametrize("setup, name", _CASES)
def test_a_fault_is_seen_in_time_on_every_rank(setup: str, name: str, outcomes: Outcomes) -> None:
    """Seen in time, on every rank, with a message that names layers and ranks."""
    _need(setup)
    _expect(outcomes[setup, name].result()[name])


@pytest.mark.alone
@pytest.mark.parametrize("setup, name", _CASES_THAT_END)
def test_a_fault_that_ends_processes_is_told_first_and_last(
    setup: str, name: str, outcomes: Outcomes
) -> None:
    """Multibn's line is the first and the last that a rank prints."""
    _need(setup)
    _expect(outcomes[setup, name].result()[name])


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(
            setup,
            marks=pytest.mark.beside(
                partial(machines.run, name, setup), SETUPS[setup].launcher, "netns"
            ),
        )
        for setup, name in (("gloo", "partition"), ("mpi", "delay"))
    ],
)
def test_a_network_that_fails_is_named_and_a_slow_one_borne(setup: str, beside: Outcome) -> None:
    """One that fails, and one with a delay."""
    assert beside.setup is SETUPS[setup]
    _expect(beside)


def _of_two_machines(script: str) -> list[str]:
    """What four processes print, two on each of two machines, machine by machine."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    where = ["--master-addr=10.77.0.1", "--master-port=29533"]
    # A fork would be in the network of the process that forks.
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHON_EXEC": sys.executable}
    with machines.two_machines(), tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(textwrap.dedent(script))
        file.flush()
        agents = [
            subprocess.Popen(
                machines.on(name, [*apart, *torchrun, *where, f"--node-rank={i}", file.name]),
                env=environment() | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i, name in enumerate(machines.MACHINES)
        ]
        try:
            return [agent.communicate(timeout=200)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def _sums_and_a_loss() -> list[str]:
    """The lines that the processes print of one sum, and of the loss of rank 3."""
    said = _of_two_machines("""
        import os, signal
        import numpy as np
        from multibn._launch import enter_world, leave_world

        world = enter_world("gloo")
        total = world.allreduce(np.random.default_rng(world.rank).standard_normal(5000))
        line = world.lines._open[0]._small
        numbers = f"{total.tobytes().hex()[:32]} {total.sum()}"
        # In one piece: four processes write.
        print(f"sum {numbers} {type(line).__name__}\\n", end="", flush=True)
        world.allreduce(total)
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        world.allreduce(total)
    """)
    lines = [line for output in said for line in output.splitlines()]
    sums = [line for line in lines if line.startswith("sum ")]
    assert len(sums) == 4, said
    return [*sums, *(line for line in lines if line.startswith("multibn: "))]


@pytest.mark.beside(_sums_and_a_loss, "torchrun", "netns")
def test_two_machines_have_the_same_sums_and_name_the_lost_rank(beside: list[str]) -> None:
    """Shared memory inside, the network between; processes of both have the same numbers.

    Where a rank is lost, no rank that lives is named, on either machine.
    """
    sums = [line for line in beside if line.startswith("sum ")]
    assert len(set(sums)) == 1, beside
    assert sums[0].endswith(" LineOverMachines")
    errors = [line for line in beside if line.startswith("multibn: ")]
    assert errors
    for line in errors:
        # torchrun may end rank 2 before that rank can say which one it has lost.
        lost = r"lost the connection in .*: (rank 2 \(.*)?rank 3 \(machine mbnode2, pid \d+\)"
        assert re.search(lost, line), line
        assert not re.search(r"rank [01] \(machine", line), line
