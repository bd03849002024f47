"""Models under DistributedDataParallel: what it goes on to broadcast, and who waits for whom."""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator
from multibn.torch_backend import SubBatchNorm2d, convert_sync_batchnorm
from multibn.torch_backend import check_sync as expect_in_sync  # not a check of its own
from tests.harness.runs import on

RUNS = on("torchrun", 2, needs="torch")

STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn2(self.bn1(self.conv(x)).relu())


class _WithBuffer(_Net):
    scale: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def _train(model: Any, world: Communicator, num_steps: int = 3) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


def _broadcast(ddp: Any) -> set[str]:
    ddp._assign_modules_buffers()  # as before each broadcast
    assert len(ddp.modules_buffers) == len(ddp.named_module_buffers)
    return set(ddp.named_module_buffers)


def check_equal_statistics_leave_the_broadcast(world: Communicator) -> None:
    """They leave after a forward pass; at once, if the model is converted in the wrapper.

    One rank may evaluate then: no broadcast is left for which the others would have to be there.
    """
    ddp = DistributedDataParallel(convert_sync_batchnorm(_Net()))
    assert len(_broadcast(ddp)) == 6
    _train(ddp, world, 1)
    assert not _broadcast(ddp)
    ddp = convert_sync_batchnorm(DistributedDataParallel(_Net()))
    assert not _broadcast(ddp)
    _train(ddp, world, 4)
    if world.rank == 0:
        with torch.no_grad():
            ddp.eval()(torch.ones(1, 3, 4, 4))
    _train(ddp.train(), world)
    expect_in_sync(ddp)


def check_other_buffers_are_broadcast_as_ever(world: Communicator) -> None:
    ddp = DistributedDataParallel(convert_sync_batchnorm(_WithBuffer(1.0 + world.rank)))
    _train(ddp, world, 1)
    assert _broadcast(ddp) == {"scale"}
    ddp.module.scale.fill_(3.0 + world.rank)
    _train(ddp, world, 3)
    assert float(ddp.module.scale) == 3.0


def check_a_checkpoint_of_rank_0_reaches_all_ranks(world: Communicator) -> None:
    """The constructor broadcasts, for training and for evaluation without any training."""
    for train in (True, False):
        net = _Net()
        if world.rank == 0:
            net.bn1.running_mean.fill_(5.0)  # type: ignore[union-attr]
        ddp = DistributedDataParallel(convert_sync_batchnorm(net))
        if train:
            _train(ddp, world, 2)
            assert float(ddp.module.bn1.running_mean.min()) > 3
        else:
            ddp.eval()(torch.ones(1, 3, 4, 4))
        expect_in_sync(ddp)


def check_statistics_of_fewer_ranks_stay_in_the_broadcast(world: Communicator) -> None:
    """Those of a part of the ranks, those with this rank's own count, those of plain layers."""
    net = _Net()
    net.bn1 = convert_sync_batchnorm(net.bn1, running_var="unbiased_local")
    net.bn2 = convert_sync_batchnorm(net.bn2, world.split(world.rank))
    net.add_module("plain", nn.BatchNorm2d(4))
    net.add_module("parts", SubBatchNorm2d(1, 4))
    net.add_module("shared", SubBatchNorm2d(1, 4, process_group=None))
    ddp = _train(DistributedDataParallel(net, find_unused_parameters=True), world, 2)
    layers = ("bn1", "bn2", "plain", "parts.bn", "parts.split_bn")
    assert _broadcast(ddp) == {f"{layer}.{name}" for layer in layers for name in STATISTICS}


def check_torchs_own_join_is_refused(world: Communicator) -> None:
    """torch's join would abort the process: an error on every rank, and the ranks go on in step."""
    model = DistributedDataParallel(convert_sync_batchnorm(_Net()))
    for options, message in (
        ({}, r"over 2 ranks\. Use multibn\.torch\.join, or join\("),
        ({"throw_on_early_termination": True}, "exhausted"),
    ):
        with pytest.raises(RuntimeError, match=message), model.join(**options):
            _train(model, world, num_steps=3 - world.rank)
        assert float(world.allreduce(torch.ones(()))) == world.size


def check_copies_and_compiled_models_train(world: Communicator) -> None:
    ddp = _train(DistributedDataParallel(convert_sync_batchnorm(_WithBuffer(1.0))), world, 1)
    copied = copy.deepcopy(ddp)
    compiled = torch.compile(copy.deepcopy(ddp), backend="eager")
    warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch asks itself
    _train(ddp, world)
    other: Any
    for other in (copied, compiled):
        _train(other, world)
        torch.testing.assert_close(
            list(other.state_dict().values()), list(ddp.state_dict().values())
        )


def check_a_compiled_model_does_not_depend_on_others(world: Communicator) -> None:
    """The end of another model is no reason to compile again, and may come while one compiles."""
    other = _train(DistributedDataParallel(convert_sync_batchnorm(_Net())), world)
    ddp = DistributedDataParallel(convert_sync_batchnorm(_Net()))
    compiled = _train(torch.compile(ddp, backend="eager"), world)
    assert not _broadcast(ddp)
    del other
    gc.collect()
    with torch.compiler.set_stance("fail_on_recompile"):
        _train(compiled, world)


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.bn1, self.bn2 = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.first(x.flatten(1)[:, :6]))
        return self.bn2(self.second(x)).pow(3)


def check_compiled_models_of_several_buckets_train(world: Communicator) -> None:
    """A compiled graph for each bucket, and one for all."""
    warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch asks itself
    model = convert_sync_batchnorm(_Linear())

    def train(optimize: bool, backend: str = "") -> Any:
        torch._dynamo.reset()
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0001)
        with torch._dynamo.config.patch(optimize_ddp=optimize):
            return _train(torch.compile(ddp, backend=backend) if backend else ddp, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
        expected = train(False).state_dict().values()
        for optimize, backend in ((False, "aot_eager"), (True, "aot_eager")):
            found = train(optimize, backend).state_dict().values()
            torch.testing.assert_close(list(found), list(expected))
