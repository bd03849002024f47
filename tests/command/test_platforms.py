"""Training where a system has no fork, memfd, poll, /proc or compiler: all are taken away.

Tried so, and not on such a system itself.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from multibn.parity.launch import environment, launch_command, run
from tests.helpers import require

pytestmark = pytest.mark.launches

# torch asks sys.platform, not the modules: torch is imported before anything is taken away.
TAKEN_AWAY = """\
import builtins, io, os, select, signal, socket, sys
import torch, torch.distributed, torch.distributed.tensor

LACKING = {
    os: "fork forkpty register_at_fork memfd_create eventfd pidfd_open killpg getuid geteuid "
    "sched_getaffinity sched_yield",
    select: "poll epoll",
    socket: "AF_UNIX",
    signal: "SIGKILL SIGSTOP SIGCONT",
}
for module, names in LACKING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
compiled = ["multibn.kernels.core._core", "multibn.communicators.transports._shared_memory"]
sys.modules |= dict.fromkeys(["fcntl", "resource", "termios", *compiled])

def without_proc(function):
    def call(path, *args, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "taken away", path)
        return function(path, *args, **options)
    return call

builtins.open = io.open = without_proc(open)
for name in ("open", "readlink", "stat", "lstat", "listdir", "scandir", "access"):
    setattr(os, name, without_proc(getattr(os, name)))
"""

PROGRAM = """
import json
from torch import nn
from multibn import info
from multibn.torch import average_gradients, check_sync, convert_sync_batchnorm

assert not os.path.exists("/proc/self/stat")
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
over = None
if store == "mpi":
    from mpi4py.MPI import COMM_WORLD as over
    rank, size = over.rank, over.size
elif size > 1:
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
torch.manual_seed(0)
x = torch.randn(8, 3).double()
model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), over)
for _ in range(3):
    model.zero_grad()
    model(x[rank::size]).square().mean().backward()
    average_gradients(model)
check_sync(model)
numbers = model[0].running_var.tolist() + model[1].weight.grad[0].tolist()
print(json.dumps([numbers, info.collect()]))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def _train(
    size: int, folder: Path, over: str = "gloo"
) -> tuple[list[float], dict[str, dict[str, str]]]:
    script, store = folder / "program.py", folder / "store"
    script.write_text(TAKEN_AWAY + PROGRAM)
    if over == "mpi":
        ran = run(launch_command("mpiexec", size, [str(script), "0", "0", "mpi"]), timeout=120)
        assert ran.returncode == 0, ran.stdout
        numbers, facts = json.loads(ran.stdout.splitlines()[-1])
        return numbers, facts
    # No forks, which have imported multibn on the whole system.
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(store)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment() | {"MULTIBN_TIMEOUT": "60"},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, outputs
    for output in outputs:
        assert output.count("about three times slower") == 1
    numbers, facts = json.loads(outputs[0].splitlines()[-1])
    return numbers, facts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    require.need("torch")
    numbers, facts = _train(1, tmp_path_factory.mktemp("alone"))
    assert "C core is missing" in facts["kernels"]["host"]
    assert "no shared memory, needs Linux" in facts["messages"]["torchrun"]
    return numbers


def test_two_processes_train_like_one_on_a_bare_system(alone: list[float], tmp_path: Path) -> None:
    require.need("torchrun")
    assert _train(2, tmp_path)[0] == pytest.approx(alone, rel=1e-12)


def test_two_processes_over_mpi_train_like_one_on_a_bare_system(
    alone: list[float], tmp_path: Path
) -> None:
    require.need("mpiexec")
    assert _train(2, tmp_path, over="mpi")[0] == pytest.approx(alone, rel=1e-12)
