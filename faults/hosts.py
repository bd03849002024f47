"""Two hosts on one machine: network namespaces joined by a pair of virtual Ethernet devices.

Needs Linux and the right to make them. `python -m faults.hosts LAUNCHER ARGUMENT...` starts
`python ARGUMENT...` on a rank in each, once `made()` is entered.
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.launch import Job
from faults.scenarios import SCENARIOS
from multibn._environment import find_command

HOSTS = ("mbhost1", "mbhost2")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")


class HostsJob(Job):
    """Scenarios of one rank on each host."""

    size = 2

    def _launched(self, arguments: list[str]) -> list[str]:
        return [sys.executable, "-m", "faults.hosts", self.launcher, *arguments]


def rows() -> Iterator[dict[str, Any]]:
    """What became of the scenarios of two hosts; nothing where they cannot be made."""
    if not possible():
        return
    for over in ("gloo", "mpi"):
        for chosen in SCENARIOS.values():
            if chosen.hosts:
                with made():
                    outcomes = list(HostsJob("multibn", over, "torch", [chosen.name]).run())
                for outcome in outcomes:
                    yield {
                        "what": chosen.what,
                        "scenario": chosen.name,
                        "over": over,
                        "seconds": outcome.seconds,
                        "seen": outcome.seen,
                        "complaint": outcome.complaint(),
                    }


def possible() -> bool:
    """Whether this process may make network namespaces."""
    tools = ("ip", "unshare", "setpriv", "hostname")
    if not all(shutil.which(tool) for tool in tools) or os.geteuid() != 0:
        return False
    tried = ["ip", "netns", "add", "mbtrial"]
    if subprocess.run(tried, capture_output=True, check=False).returncode != 0:
        return False
    subprocess.run(["ip", "netns", "del", "mbtrial"], check=True)
    return True


@contextlib.contextmanager
def made() -> Iterator[None]:
    """Two hosts, for as long as the context lasts."""
    _remove()
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
            names = Path("/etc/netns", host)
            names.mkdir(parents=True, exist_ok=True)
            lines = [f"{a} {h}" for a, h in zip(_ADDRESSES, HOSTS, strict=True)]
            (names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        first, second = HOSTS
        _ip("link", "add", "eth0", "netns", first, "type", "veth",
            "peer", "name", "eth0", "netns", second)  # fmt: skip
        for host, address in zip(HOSTS, _ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        _remove()


def _remove() -> None:
    for host in HOSTS:
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
