"""Faults under DistributedDataParallel, as the README uses it: multibn's error comes first."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.helpers import launch, require

pytestmark = pytest.mark.launches

# Each rank runs all cases at once, each in a child, for which torch and the kernels are loaded.
_SCRIPT = """
    import json, os, signal, sys, time
    from collections import OrderedDict
    os.environ["MULTIBN_TIMEOUT"] = "3"
    import torch, torch._dynamo, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from multibn import SingleProcess
    from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm

    SyncBatchNorm(4, process_group=SingleProcess())(torch.ones(2, 4)).sum().backward()

    def fail(fault):
        print(f"pid {os.getpid()}", flush=True)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "ended":
            sys.exit()
        time.sleep(6)

    def main(case, rank, fault, last_step, has_buffer):
        # The launcher's store has the addresses of earlier cases: a prefix for each.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(str(case), dist.TCPStore(*address, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        layers = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "last": nn.Conv2d(4, 4, 1)}
        model = nn.Sequential(OrderedDict(layers))
        if has_buffer:
            model.register_buffer("other", torch.ones(3))
        model = DistributedDataParallel(convert_sync_batchnorm(model))
        for step in range(last_step + 1):
            if rank == 1 and step == last_step:
                fail(fault)
            model(torch.randn(2, 3, 8, 8)).sum().backward()
        print("nothing happened", flush=True)

    rank, directory = int(os.environ["RANK"]), sys.argv[2]
    children = []
    for case, (fault, *arguments, _) in enumerate(json.loads(sys.argv[1])):
        children.append(os.fork())
        if children[case] == 0:
            output = os.open(f"{directory}/{case}.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1), os.dup2(output, 2)
            main(case, rank, fault, *arguments)
            sys.exit()
    for case, child in enumerate(children):
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(f"{directory}/{case}.{rank}.status", "w") as file:
            file.write(str(status))
"""
_SAID = {
    "killed": "rank 0 lost the connection in {place}: rank 1 (machine ",
    "ended": "rank 0 waits in {place} for rank(s) [1], whose program ended before",
    "late": "rank 0 has waited 3 s in {place} for rank(s) [1]: rank 1 (machine ",
}


# Fault, step, whether the model has a buffer of its own, and the place in the error:
# DistributedDataParallel agrees on the order of the gradients before its second forward pass, and
# broadcasts buffers that are not of synchronized layers before each.
_CASES = [
    ("killed", 1, False, "the first message of DistributedDataParallel (before forward, "),
    ("ended", 3, False, "bn (forward, float32, call 4)"),
    ("late", 2, False, "bn (forward, float32, call 3)"),
    ("late", 3, True, "DistributedDataParallel (before forward, float64, call 3)"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a file with the output of each case and rank."""
    require.need("torch", "torchrun")
    folder = tmp_path_factory.mktemp("cases")
    script = folder / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    result = launch.run("torchrun", 2, str(script), json.dumps(_CASES), str(folder))
    assert result.returncode == 0, result.stdout
    return folder


@pytest.mark.parametrize("case", range(len(_CASES)))
def test_the_named_error_comes_first(case: int, directory: Path) -> None:
    fault, _, _, place = _CASES[case]
    output, lost = (Path(directory, f"{case}.{rank}").read_text() for rank in range(2))
    assert Path(directory, f"{case}.0.status").read_text() == "1"
    assert "nothing happened" not in output
    start, *rest = _SAID[fault].format(place="{}").split("{}")
    line = next(line for line in output.splitlines() if line.startswith("multibn: "))
    assert start + place in line, output
    assert all(words in line for words in rest), output
    pid = next(line for line in lost.splitlines() if line.startswith("pid "))
    assert f"{pid})" in line, output
    assert "last seen" in line
    assert "in bn (backward, float32, " in line  # the layer that it was in
