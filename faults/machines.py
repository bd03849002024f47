"""Two machines in one: network namespaces joined by a pair of virtual Ethernet devices.

The pair can be replaced by a link with a delay, see `delay_line`. Needs Linux and permission to
create namespaces. Inside `two_machines()`, `python -m faults.machines LAUNCHER RANKS ARGUMENT...`
starts `python ARGUMENT...` on RANKS ranks per machine.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults import delay_line
from faults.launch import Job
from faults.outcome import Outcome
from faults.scenarios import Scenario
from faults.setups import SETUPS, Setup
from multibn._platform import find_command
from tests.helpers import require

MACHINES = ("mbnode1", "mbnode2")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass
class MachinesJob(Job):
    """Scenarios that share a launch across both machines."""

    size: int = 2

    def _launched(self, arguments: list[str], size: int) -> list[str]:
        command = [sys.executable, "-m", "faults.machines", self.setup.launcher, str(size // 2)]
        return [*command, *arguments]


def outcomes(chosen: Sequence[Scenario]) -> Iterator[Outcome]:
    """Yield the outcomes of scenarios on two machines; none if namespaces cannot be created."""
    if require.available("netns"):
        for setup in ("gloo", "mpi"):
            for scenario in chosen:
                if scenario.per_machine and setup in scenario.setups:
                    yield run(scenario, SETUPS[setup])


def run(scenario: Scenario, setup: Setup) -> Outcome:
    """Run a scenario on two machines and return the outcome."""
    with two_machines(scenario.delay):
        (outcome,) = MachinesJob(setup, [scenario], 2 * scenario.per_machine).run()
    return outcome


@contextlib.contextmanager
def two_machines(delay: float = 0.0) -> Iterator[None]:
    """Create two machines, and remove them at the end; their link delays by `delay` seconds."""
    _remove()
    with contextlib.ExitStack() as stack:
        stack.callback(_remove)
        for machine in MACHINES:
            _ip("netns", "add", machine)
            names = Path("/etc/netns", machine)
            names.mkdir(parents=True, exist_ok=True)
            lines = [f"{a} {m}" for a, m in zip(_ADDRESSES, MACHINES, strict=True)]
            (names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        first, second = MACHINES
        if delay:
            line = delay_line.start(delay, [(machine, "eth0") for machine in MACHINES])
            stack.callback(line.wait)
            stack.callback(line.kill)
        else:
            _ip("link", "add", "eth0", "netns", first, "type", "veth",
                "peer", "name", "eth0", "netns", second)  # fmt: skip
        for machine, address in zip(MACHINES, _ADDRESSES, strict=True):
            _ip("-n", machine, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", machine, "link", "set", device, "up")
        yield


def _remove() -> None:
    for machine in MACHINES:
        # mpiexec's daemon on the other machine outlives mpiexec if the link is down.
        listed = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, check=False)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", machine], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns", machine), ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def on(machine: str, command: list[str]) -> list[str]:
    """Return a command line that runs `command` on a machine, and dies with its parent process."""
    inside = f"hostname {machine}; exec setpriv --pdeathsig KILL {shlex.join(command)}"
    return ["ip", "netns", "exec", machine, "unshare", "--uts", "sh", "-c", inside]


def main(launcher: str, per_machine: str, *arguments: str) -> int:
    # With PYTHON_EXEC, launchers would fork ranks from a process in another network namespace.
    os.environ.pop("PYTHON_EXEC", None)
    if launcher == "mpiexec":
        return _mpiexec(per_machine, list(arguments))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = [f"--master-addr={_ADDRESSES[0]}", f"--master-port={port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *where]
    torchrun += [f"--nproc-per-node={per_machine}"]
    agents = [
        subprocess.Popen(on(machine, [*torchrun, f"--node-rank={i}", *arguments]))
        for i, machine in enumerate(MACHINES)
    ]
    return max(agent.wait() for agent in agents)


def _mpiexec(per_machine: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        # A replacement for ssh; each machine has a separate TMPDIR.
        agent = Path(directory, "agent")
        agent.write_text(
            "#!/bin/sh\nhost=$1; shift\n"
            f"export TMPDIR={directory}/$host; mkdir -p $TMPDIR\n"
            'exec ip netns exec $host unshare --uts sh -c "hostname $host; $*"\n'
        )
        agent.chmod(0o755)
        mpiexec = [
            find_command("mpiexec") or "mpiexec",
            *("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", "eth0"),
            *("--host", ",".join(f"{machine}:{per_machine}" for machine in MACHINES)),
            *("--map-by", f"ppr:{per_machine}:node"),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
            *("--mca", "btl_tcp_if_include", "eth0"),
        ]
        command = [*mpiexec, sys.executable, "-m", "mpi4py", *arguments]
        return subprocess.run(on(MACHINES[0], command), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
