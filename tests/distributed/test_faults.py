"""Faults of `python -m faults` that take little time, on real processes: what the user sees."""

import contextlib
import functools
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from multibn._environment import find_command
from multibn.parity.launch import environment
from tests.helpers import require

require.need("torch")

from faults import hosts  # noqa: E402
from faults.launch import Job, Outcome  # noqa: E402
from faults.scenarios import SCENARIOS  # noqa: E402

_TOGETHER = [
    *("channels", "dtype", "order_first", "order", "left_out", "layer_in_eval", "network_in_eval"),
    *("no_gradient", "recomputed", "empty", "one_value", "nan", "refused", "diverged", "version"),
]
_ALONE = {
    ("gloo", "torch"): ("killed", "launcher_killed"),
    ("mpi", "chainer"): ("out_of_data", "exception_plain"),
}
_NEEDS = {"gloo": "torchrun", "mpi": "mpiexec"}


@functools.cache
def _outcomes(over: str, framework: str, *names: str) -> dict[str, Outcome]:
    outcomes = Job("multibn", over, framework, list(names)).run()
    return {outcome.scenario: outcome for outcome in outcomes}


def _expect(outcome: Outcome) -> None:
    complaint = outcome.complaint(slack=5.0)  # the machine may be busy
    assert not complaint, f"{complaint}\n{outcome.ranks}\n{outcome.output}"


@pytest.mark.parametrize("name", _TOGETHER)
@pytest.mark.parametrize("over, framework", list(_ALONE))
def test_fault(over: str, framework: str, name: str) -> None:
    """Detected in time, on every rank, with a message that names layers and ranks."""
    require.need(_NEEDS[over], framework)
    if framework not in SCENARIOS[name].frameworks:
        return
    names = [n for n in _TOGETHER if framework in SCENARIOS[n].frameworks]
    _expect(_outcomes(over, framework, *names)[name])


@pytest.mark.parametrize(
    "over, framework, name",
    [(over, framework, name) for (over, framework), ns in _ALONE.items() for name in ns],
)
def test_fault_that_ends_processes(over: str, framework: str, name: str) -> None:
    require.need(_NEEDS[over], framework)
    _expect(_outcomes(over, framework, name)[name])


def test_survivors_go_on_where_mpi_lets_them(tmp_path: Path) -> None:
    """Open MPI with ULFM: `shrink` after a rank was killed, and exact statistics of the rest."""
    require.need("mpiexec")
    script = tmp_path / "survive.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            import torch
            from multibn.communicators.mpi import MPI
            from multibn.torch_backend import SyncBatchNorm

            world = MPI()
            layer = SyncBatchNorm(3, process_group=world, momentum=1.0, dtype=torch.float64)
            x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) * (1 + world.rank)
            layer(x)
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                layer(x)
                layer(x)
            except ConnectionError:
                world = world.shrink()
                layer.process_group = world
            layer(x)
            print("survivors", world.size, layer.running_mean.tolist(), flush=True)
            """
        )
    )
    command = [find_command("mpiexec") or "", "--with-ft", "ulfm", "-n", "3", sys.executable]
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [*command, "-m", "mpi4py", str(script)],
            env=environment() | {"MULTIBN_TIMEOUT": "10"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Not until its end: MPI may take long to finalize after a failure.
    limit = time.monotonic() + 60
    done = "survivors 2 [9.0, 11.0, 13.0]"
    while said.read_text().count(done) < 2 and time.monotonic() < limit:
        time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second is "at once"
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
    output = said.read_text()
    assert output.count(done) == 2, output
    assert "lost the connection in SyncBatchNorm (forward, float64, call" in output


def test_a_network_that_fails_between_two_hosts() -> None:
    require.need("torchrun")
    if not hosts.possible():
        pytest.skip("network namespaces cannot be made here")
    with hosts.made():
        _expect(next(hosts.HostsJob("multibn", "gloo", "torch", ["partition"]).run()))
