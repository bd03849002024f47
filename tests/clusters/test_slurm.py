"""A real Slurm with two nodes on one machine, as root, from Debian's packages: `make clusters`."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from multibn.parity import launch as _launch
from tests.helpers import launch, require
from tests.helpers.pages import commands, programs

pytestmark = [pytest.mark.launches, pytest.mark.timeout(600)]
GUIDE = "docs/guides/multi-node.md"
LOSSES = commands("README.md")[0].printed


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the programs of the pages, while Slurm runs."""
    require.need("slurm")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    munge = Path("/etc/munge/munge.key")
    if not munge.exists():
        munge.write_bytes(os.urandom(1024))
    for path in (munge, "/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(path).mkdir(exist_ok=True) if path != munge else munge.chmod(0o400)
        shutil.chown(path, "munge", "munge")
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True)
    # Slurm's plugin for PMIx asks for the name that the package for developers has.
    library = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so")
    if not library.exists():
        library.symlink_to("libpmix.so.2")
    template = (Path(__file__).parent / "slurm.conf").read_text().partition("\n")[2]
    conf = folder / "slurm.conf"
    conf.write_text(template.format(host=socket.gethostname(), folder=folder))
    os.environ["SLURM_CONF"] = str(conf)
    daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    running = []
    try:
        for number, command in enumerate(daemons):
            with (folder / f"{number}.log").open("w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(2)  # the nodes look for their controller once
        for page in ("README.md", GUIDE):
            for name, program in programs(page).items():
                (folder / name).write_text(program)
        yield folder
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(30)
        del os.environ["SLURM_CONF"]


def _run(folder: Path, command: str, *, status: int = 0) -> str:
    """What the command prints, in the environment of these tests."""
    variables = _launch.environment() | launch.VARIABLES
    ran = launch.captured("bash", "-c", command, cwd=folder, env=variables)
    assert (ran.returncode == 0) == (status == 0), ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def _losses(printed: str) -> list[str]:
    return re.findall(r"^step \d: loss .*$", printed, re.MULTILINE)


def test_sbatch_starts_a_launcher_on_each_node(slurm: Path) -> None:
    """The job of the guide, with one process a node."""
    text = (launch.ROOT / GUIDE).read_text()
    (job,) = re.findall(r"(#!/bin/bash\n[^`]*torchrun[^`]*)```", text)
    (slurm / "job.sh").write_text(
        job.replace("--cpus-per-task=8", "--cpus-per-task=2").replace("node 4", "node 1")
    )
    _run(slurm, "sbatch --wait --output job.log job.sh")
    assert _losses((slurm / "job.log").read_text()) == LOSSES


def test_srun_starts_ranks_by_pmix(slurm: Path) -> None:
    printed = _run(slurm, "srun -n 2 -N 1 --mpi=pmix python -m mpi4py train_mpi.py")
    assert _losses(printed) == LOSSES


def test_mpiexec_runs_in_an_allocation(slurm: Path) -> None:
    printed = _run(slurm, "salloc -N 2 -n 2 mpiexec -n 2 python -m mpi4py train_mpi.py")
    assert _losses(printed) == LOSSES


def test_srun_without_pmix_makes_worlds_of_one_and_a_warning(slurm: Path) -> None:
    printed = _run(slurm, "srun -n 2 python -m mpi4py train_mpi.py")
    assert "MPI.COMM_WORLD has 1 process" in printed
    assert "--mpi=pmix" in printed


def test_a_rank_that_leaves_is_named(slurm: Path) -> None:
    (slurm / "leaves.py").write_text("""\
import os
import torch
import torch.distributed as dist
from torch import nn
from multibn.torch import convert_sync_batchnorm

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=size)
model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
for step in range(5):
    if rank == 1 and step == 3:
        os._exit(0)
    model(torch.randn(4, 3)).sum().backward()
""")
    printed = _run(slurm, "srun -n 2 -N 2 python leaves.py", status=1)
    assert re.search(r"ConnectionError: .*rank\(s\)? ?\[?1\]?|rank 1 .*has ended", printed), printed
