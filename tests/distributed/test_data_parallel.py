"""Faults under DistributedDataParallel, as the README uses it: multibn's error comes first."""

import textwrap
from pathlib import Path

import pytest

from tests.helpers import launch, require

_SCRIPT = """
    import os, signal, sys, time
    from collections import OrderedDict
    os.environ["MULTIBN_TIMEOUT"] = "3"
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from multibn.torch_backend import convert_sync_batchnorm

    fault, last_step, with_buffer = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
    dist.init_process_group("gloo")
    layers = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "last": nn.Conv2d(4, 4, 1)}
    model = nn.Sequential(OrderedDict(layers))
    if with_buffer:
        model.register_buffer("other", torch.ones(3))
    model = DistributedDataParallel(convert_sync_batchnorm(model))
    for step in range(last_step + 1):
        if dist.get_rank() == 1 and step == last_step:
            print(f"pid {os.getpid()}", flush=True)
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "ended":
                sys.exit()
            time.sleep(8)
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    print("nothing happened", flush=True)
"""
_SAID = {
    "killed": "rank 0 lost the connection in {place}: rank 1 (machine ",
    "ended": "rank 0 waits in {place} for rank(s) [1], whose program ended before",
    "late": "rank 0 has waited 3 s in {place} for rank(s) [1]: rank 1 (machine ",
}


@pytest.mark.parametrize(
    "fault, step, arguments, place",
    [
        # DistributedDataParallel agrees on the order of the gradients before its second forward
        # pass, and broadcasts buffers that are not of synchronized layers before each.
        (
            "killed",
            1,
            [],
            "the first message of DistributedDataParallel (before forward, ",
        ),
        ("ended", 3, [], "bn (forward, float32, call 4)"),
        ("late", 2, [], "bn (forward, float32, call 3)"),
        ("late", 3, ["buffer"], "DistributedDataParallel (before forward, float64, call 3)"),
    ],
)
def test_the_named_error_comes_first(
    fault: str, step: int, arguments: list[str], place: str, tmp_path: Path
) -> None:
    require.need("torch", "torchrun")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    result = launch.run("torchrun", 2, str(script), fault, str(step), *arguments)
    output = result.stdout
    assert result.returncode != 0, output
    assert "nothing happened" not in output
    start, *rest = _SAID[fault].format(place="{}").split("{}")
    said = next((line for line in output.splitlines() if start + place in line), "")
    assert all(words in said for words in rest), output
    pid = next(line for line in output.splitlines() if line.startswith("pid "))
    assert f"{pid})" in said, output
    assert "last seen" in said
    assert "in bn (backward, float32, " in said  # the layer that it was in
