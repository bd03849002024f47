"""Models converted as torch's documents convert them, under DistributedDataParallel on 2 ranks.

The expected numbers are those of nn.BatchNorm2d in one process on the whole batch, which is what
nn.SyncBatchNorm promises and cannot show without GPUs.
"""

import copy
import io
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm
from tests.harness.runs import on
from tests.torch_backend.convert.test_class_swap import Activated2d

RUNS = on("torchrun", 2, needs="torch")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)
    ).double()


def _batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)


def _whole_batch(step: int, world: Communicator) -> torch.Tensor:
    return torch.cat([_batch(step, rank) for rank in range(world.size)])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def _train(model: nn.Module, optimizer: Any, batches: Iterable[torch.Tensor]) -> None:
    model.train()
    for x in batches:
        optimizer.zero_grad()
        model(x).pow(3).mean().backward()
        optimizer.step()


def _assert_equal(got: nn.Module, expected: nn.Module) -> None:
    assert got.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], value, rtol=1e-9, atol=1e-11, msg=name)


def check_training_goes_on_after_evaluation_between_steps(world: Communicator) -> None:
    whole = _model()
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(_model()))
    optimizers = [_optimizer(whole), _optimizer(model)]
    unseen = _batch(99, 0)
    for epoch in range(3):
        steps = [2 * epoch, 2 * epoch + 1]
        _train(whole, optimizers[0], [_whole_batch(step, world) for step in steps])
        _train(model, optimizers[1], [_batch(step, world.rank) for step in steps])
        with torch.no_grad():
            expected = whole.eval()(unseen)
            torch.testing.assert_close(model.eval()(unseen), expected, rtol=1e-9, atol=1e-11)
    _assert_equal(model.module, whole)


def check_training_resumes_from_torchs_files(world: Communicator) -> None:
    """A file of nn.BatchNorm2d or nn.SyncBatchNorm, saved under DDP's names, goes on as it was."""
    for original in (nn.Module, nn.SyncBatchNorm):
        whole = _model()
        optimizer = _optimizer(whole)
        _train(whole, optimizer, [_whole_batch(step, world) for step in range(2)])
        saved: Any = copy.deepcopy(whole)
        if original is nn.SyncBatchNorm:
            saved = nn.SyncBatchNorm.convert_sync_batchnorm(saved)
        file = io.BytesIO()
        names = {f"module.{name}": value for name, value in saved.state_dict().items()}
        torch.save({"model": names, "optimizer": optimizer.state_dict()}, file)

        file.seek(0)
        checkpoint = torch.load(file)
        model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(_model()))
        resumed = _optimizer(model)
        model.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
        _train(whole, optimizer, [_whole_batch(step, world) for step in range(2, 5)])
        _train(model, resumed, [_batch(step, world.rank) for step in range(2, 5)])
        _assert_equal(model.module, whole)


def _mixed_model() -> nn.Sequential:
    conv, norm, *rest = _model()
    return nn.Sequential(conv, norm, Activated2d(4).double(), *rest)


def check_models_convert_before_or_after_wrapping(world: Communicator) -> None:
    """DistributedDataParallel, and FSDP2 of the layers themselves and of the model."""
    mesh = dist.init_device_mesh("cpu", (world.size,))

    def sharded(model: Any) -> Any:
        for layer in model:
            if isinstance(layer, nn.BatchNorm2d):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    whole = _mixed_model()
    _train(whole, _optimizer(whole), [_whole_batch(step, world) for step in range(3)])
    for wrap in (DistributedDataParallel, sharded):
        for model in (
            wrap(convert_sync_batchnorm(_mixed_model(), strict=True)),
            convert_sync_batchnorm(wrap(_mixed_model()), strict=True),
        ):
            _train(model, _optimizer(model), [_batch(step, world.rank) for step in range(3)])
            inner: Any = getattr(model, "module", model)
            layers = [layer for layer in inner if isinstance(layer, nn.BatchNorm2d)]
            assert [isinstance(layer, SyncBatchNorm) for layer in layers] == [True] * 3
            assert isinstance(layers[1], Activated2d)
            for name, expected in whole.state_dict().items():
                got = inner.state_dict()[name]
                got = got.full_tensor() if isinstance(got, DTensor) else got
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11, msg=name)
