"""Two hosts on one machine: network namespaces joined by a pair of virtual Ethernet devices.

Or by a line that takes its time, see `delay_line`. Needs Linux and the right to make them.
`python -m faults.hosts LAUNCHER ARGUMENT...` starts `python ARGUMENT...` on a rank in each, once
`made()` is entered.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import delay_line
from faults.launch import Job, Outcome
from faults.scenarios import SCENARIOS
from multibn._environment import find_command
from tests.helpers import require

HOSTS = ("mbhost1", "mbhost2")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")


class HostsJob(Job):
    """Scenarios of one rank on each host."""

    size = 2

    def _launched(self, arguments: list[str], size: int) -> list[str]:
        return [sys.executable, "-m", "faults.hosts", self.launcher, *arguments]


def rows() -> Iterator[dict[str, Any]]:
    """What became of the scenarios of two hosts; nothing where they cannot be made."""
    if not require.available("netns"):
        return
    for over in ("gloo", "mpi"):
        for chosen in SCENARIOS.values():
            if chosen.hosts:
                outcome = run(chosen.name, over)
                yield {
                    "what": chosen.what,
                    "scenario": chosen.name,
                    "over": over,
                    "seconds": outcome.seconds,
                    "seen": outcome.seen,
                    "complaint": outcome.complaint(),
                }


def run(name: str, over: str) -> Outcome:
    """What becomes of a scenario of two hosts."""
    with made(SCENARIOS[name].delay):
        (outcome,) = HostsJob("multibn", over, "torch", [name]).run()
    return outcome


@contextlib.contextmanager
def made(delay: float = 0.0) -> Iterator[None]:
    """Two hosts, for as long as the context lasts; the line between them takes `delay` seconds."""
    _remove()
    with contextlib.ExitStack() as stack:
        stack.callback(_remove)
        for host in HOSTS:
            _ip("netns", "add", host)
            names = Path("/etc/netns", host)
            names.mkdir(parents=True, exist_ok=True)
            lines = [f"{a} {h}" for a, h in zip(_ADDRESSES, HOSTS, strict=True)]
            (names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        first, second = HOSTS
        if delay:
            line = delay_line.start(delay, [(host, "eth0") for host in HOSTS])
            stack.callback(line.wait)
            stack.callback(line.kill)
        else:
            _ip("link", "add", "eth0", "netns", first, "type", "veth",
                "peer", "name", "eth0", "netns", second)  # fmt: skip
        for host, address in zip(HOSTS, _ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
        yield


def _remove() -> None:
    for host in HOSTS:
        # mpiexec's daemon on the other host outlives it when the line is down.
        listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, check=False)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def on(host: str, command: list[str]) -> list[str]:
    """A command that runs `command` on a host, and ends with the process that starts it."""
    inside = f"hostname {host}; exec setpriv --pdeathsig KILL {shlex.join(command)}"
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", inside]


def main(launcher: str, *arguments: str) -> int:
    if launcher == "mpiexec":
        return _mpiexec(list(arguments))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                f"--master-addr={_ADDRESSES[0]}", f"--master-port={port}"]  # fmt: skip
    agents = [
        subprocess.Popen(on(host, [*torchrun, f"--node-rank={i}", *arguments]))
        for i, host in enumerate(HOSTS)
    ]
    return max(agent.wait() for agent in agents)


def _mpiexec(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        # Takes the place of ssh; each host has temporary files of its own.
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
            *("--host", ",".join(f"{host}:1" for host in HOSTS), "--map-by", "ppr:1:node"),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
            *("--mca", "btl_tcp_if_include", "eth0"),
        ]
        command = [*mpiexec, sys.executable, "-m", "mpi4py", *arguments]
        return subprocess.run(on(HOSTS[0], command), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
