"""What no graph can guard is asked when an operator runs: each row is changed between two steps."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from multibn.engine import recording, replaying
from multibn.torch import SyncBatchNorm, step_statistics
from tests.helpers import launch
from tests.helpers.ranks import EqualRanks

NEEDS = "torch"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own


def _step(call: Any, layer: Any, x: Tensor) -> list[Tensor]:
    y = call(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, layer.weight, layer.bias])]


def _input() -> Tensor:
    return torch.randn(4, 3, 5, requires_grad=True)


def _same_as_eager(change: Callable[[Any, Any, Tensor], Any]) -> tuple[Any, Any]:
    """Compile a layer, and `change` a step of it and of one that is not compiled."""
    layer, eager = (SyncBatchNorm(3, fuse_relu=True) for _ in "ab")
    call, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), _input()
    for _ in range(2):
        _step(call, layer, x), _step(eager, eager, x)
    found, expected = change(call, layer, x), change(eager, eager, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(list(layer.buffers()), list(eager.buffers()))
    return call, layer


def test_a_recomputation_is_seen() -> None:
    """Compiled code in `step_statistics` adds a recomputed batch with a count of 0."""

    def again(call: Any, layer: Any, x: Tensor) -> list[Tensor]:
        with recording() as tape:
            first = _step(call, layer, x)
        with replaying(tape):
            return [*first, *_step(call, layer, x)]

    def change(call: Any, layer: Any, x: Tensor) -> list[Tensor]:
        results = again(call, layer, x)
        with step_statistics(layer):
            return [*results, *again(call, layer, x)]

    _same_as_eager(change)


def test_anomaly_mode_is_seen() -> None:
    call, _ = _same_as_eager(_step)
    y = call(_input())
    anomaly = torch.autograd.set_detect_anomaly(mode=True, check_nan=False)
    with anomaly, pytest.raises(FloatingPointError, match="the gradient of the output"):
        y.backward(torch.full_like(y, torch.nan))


def test_a_plan_that_is_gone_is_made_again() -> None:
    def forget(call: Any, layer: Any, x: Tensor) -> list[Tensor]:
        layer.layer_communicator.plans.clear()
        y = call(x)
        layer.layer_communicator.plans.clear()
        return [y, *torch.autograd.grad(y.sin().sum(), x)]

    _, layer = _same_as_eager(forget)
    assert layer.layer_communicator.plans


@contextmanager
def _default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_another_default_group_is_seen() -> None:
    call, layer = _same_as_eager(_step)
    plans = layer.layer_communicator.plans
    for _ in range(2):
        before = len(plans)
        with _default_group():
            _step(call, layer, _input())
        assert len(plans) == before + 1


def test_ddps_join_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SyncBatchNorm(3, process_group=EqualRanks())
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    call(_input())
    with _default_group():
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        ddp._join_config = ddp._join_config._replace(enable=True)
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", ddp)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"multibn\.torch\.join"):
                call(_input())


# Layers a and b in one order or another; prints the counters of the caches, and errors.
PROGRAM = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from multibn.torch import SyncBatchNorm
order, seed, size = sys.argv[1:]
from tests.helpers.ranks import EqualRanks

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name in order:
            momentum = 0.1 if name == "a" else 0.5
            ranks = EqualRanks(int(size))
            setattr(self, name, SyncBatchNorm(4, momentum=momentum, process_group=ranks))
    def forward(self, x): return self.b(self.a(x).relu() * 2)

torch.manual_seed(int(seed))
nets = Net(), Net()
nets[1].load_state_dict(nets[0].state_dict())
x, found = torch.randn(6, 4, 5, 5, requires_grad=True), []
for net, call in ((nets[0], nets[0]), (nets[1], torch.compile(nets[1], fullgraph=True))):
    for _ in range(2):
        y = call(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
    found.append([y, *grads, *net.buffers()])
torch.testing.assert_close(*found)
print(json.dumps({**counters["inductor"], **counters["aot_autograd"]}))
"""


def test_a_second_start_finds_its_graphs(tmp_path: Path) -> None:
    """A graph from the disk is right with other weights, sizes of the world, orders of layers."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables: Any = {"PYTHONPATH": str(launch.ROOT), "OMP_NUM_THREADS": "1"}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    python = sys.executable  # the forks after it have another hash seed
    rows = [("ab", 0, 1, 0), ("ab", 1, 3, 1), ("ba", 0, 1, 0)]
    for *row, hits in rows:
        said = launch.printed(str(program), *map(str, row), interpreter=python, **variables)
        counted = json.loads(said.splitlines()[-1])
        assert counted.get("autograd_cache_hit", 0) == hits, (row, counted)
        python = launch.python()
