"""Pipelines: 2 stages x 2 data-parallel ranks, by the example of the page on pipelines."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from multibn.communicators import Communicator
from multibn.communicators.exit import watched_channels
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch_backend import convert_sync_batchnorm
from tests.harness.runs import on
from tests.helpers.pages import programs

RUNS = on("torchrun", 4, needs="torch")

NUM_MICRO_BATCHES = 3


def _network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(),
    ).double()  # fmt: skip


def _batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(steps, 18, n, generator=generator).double() for n in (6, 8))
    return list(zip(x, target, strict=True))


def check_the_guide_trains_like_one_process(world: Communicator) -> None:
    whole, batches = _network(), _batches(3)
    alone = copy.deepcopy(whole)
    guide: dict[str, Any] = {}
    exec(programs("docs/guides/gradient-accumulation.md")["pipeline.py"], guide)
    model = guide["train"](whole, batches, NUM_MICRO_BATCHES, F.mse_loss)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    norms = [alone[1], alone[4]]
    inputs: dict[Any, list[Tensor]] = {}
    for norm in norms:
        norm.register_forward_pre_hook(lambda norm, args: inputs.setdefault(norm, []).append(*args))
    for batch in batches:
        inputs.clear()
        before = copy.deepcopy(norms)
        for k in range(NUM_MICRO_BATCHES):
            # A micro-batch is what both ranks of a stage have in it.
            x, target = (
                torch.cat([part.chunk(NUM_MICRO_BATCHES)[k] for part in t.chunk(2)]) for t in batch
            )
            (F.mse_loss(alone(x), target) / NUM_MICRO_BATCHES).backward()
        for norm, old in zip(norms, before, strict=True):  # the running statistics of one batch
            old._forward_pre_hooks.clear()
            old(torch.cat(inputs[norm]))
            norm.load_state_dict(old.state_dict())
        optimizer.step()
        optimizer.zero_grad()
    expected = alone[:3] if world.rank % 2 == 0 else alone[3:]
    torch.testing.assert_close(
        list(model.state_dict().values()), list(expected.state_dict().values()),
        rtol=1e-12, atol=1e-12,
    )  # fmt: skip
    assert model[1].num_batches_tracked == 3


def check_stages_that_share_the_default_group_are_an_error(world: Communicator) -> None:
    """Every rank gets an error that names the layer and the ranks that do not come."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp = mesh["pp"]
    index = pp.get_local_rank()
    # All ranks, as the default group; later checks need the default group itself.
    everyone = TorchDistributed(dist.new_group())
    everyone.channel.watchdog.timeout = 1.0
    net = convert_sync_batchnorm(_network(), everyone)
    x, target = _batches(1)[0]
    stage = PipelineStage(
        net[3:] if index else net[:3], index, 2, x.device, group=pp.get_group(),
        input_args=target[:9] if index else x[:9], output_args=target[:9],
    )  # fmt: skip
    schedule = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
    world.allreduce(torch.ones(1))  # a rank that is a second late would be missed as well
    with pytest.raises(RuntimeError, match="failed to run forward") as caught:
        schedule.step(*(() if index else (x,)), target=target if index else None)
    if index == 0:  # the other stage waits for an output
        dist.send(target[:9], world.rank + 1, pp.get_group())
    watched_channels.discard(everyone.channel)
    reason = str(caught.value.__cause__)
    # The first rank that gives up tells the others.
    missing = (
        r"rank \d has waited 1 s in the first message of layer 1 \(forward, float64, call 1\) for "
        r"rank\(s\) \[1, 3\]: no rank of the group has connected yet"
    )
    assert re.match(rf"(rank \d has failed: )*{missing}", reason), reason
