"""The plugin and the callback in Lightning's own Trainer, with strategy="ddp" on CPU."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm1d, convert_sync_batchnorm
from tests.harness.runs import on
from tests.torch_backend.integrations.checks_mmengine import frameworks_warnings

with frameworks_warnings():
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import TorchSyncBatchNorm
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from multibn.torch_backend.integrations.lightning import MultiBNLayerSync, PreciseBN

RUNS = on("torchrun", 2, needs="torch lightning")

SAMPLES = 20
BATCH_SIZE = 3


class Net(pl.LightningModule):
    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn = nn.BatchNorm1d(3, momentum=momentum)
        self.head = nn.Linear(3, 1)
        self.classes: set[type] = set()
        self.batches: list[Any] = []
        self.validated: list[tuple[Any, Any]] = []

    def forward(self, x: Any) -> Any:
        return self.head(self.bn(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.classes.add(type(self.bn))
        self.batches.append(batch[0])
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.bn.running_mean is not None
        assert self.bn.running_var is not None
        self.validated.append((self.bn.running_mean.clone(), self.bn.running_var.clone()))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0]]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _data() -> Any:
    return 5 + 2 * torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))


def _loader(shuffle: bool = True, **options: Any) -> Any:
    return DataLoader(TensorDataset(_data()), BATCH_SIZE, shuffle=shuffle, **options)


def _fit(world: Communicator, loader: Any, *callbacks: Any, **options: Any) -> Net:
    """A network that has trained."""
    net: Net = options.pop("make", Net)(options.pop("momentum", 0.1))
    with frameworks_warnings(), tempfile.TemporaryDirectory() as root:
        trainer = pl.Trainer(
            **{
                "accelerator": "cpu",
                "strategy": "ddp",
                "devices": world.size,
                "plugins": [MultiBNLayerSync()],
                "callbacks": list(callbacks),
                "default_root_dir": root,
                "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "logger": False,
                "num_sanity_val_steps": 0,
                **options,
            }
        )
        loaders = (loader, _loader(shuffle=False, num_workers=0))
        is_module = isinstance(loader, pl.LightningDataModule)
        trainer.fit(net, *loaders[: 1 if is_module else 2])
    return net


def _exact(mean: Any, var: Any) -> bool:
    x = 2 * _data().double().numpy()
    return np.allclose(mean, x.mean(0), 1e-6) and np.allclose(var, x.var(0, ddof=1), 1e-6)


def check_layers_are_synchronized_while_fitting(world: Communicator) -> None:
    net = _fit(world, _loader(), momentum=1.0, max_steps=1)
    x = net.batches[0].double()
    sums = world.allreduce(torch.stack([x.sum(0), x.square().sum(0)])) / (BATCH_SIZE * world.size)
    n = BATCH_SIZE * world.size
    assert net.classes == {SyncBatchNorm1d}
    assert type(net.bn) is nn.BatchNorm1d
    np.testing.assert_allclose(net.bn.running_mean, sums[0], rtol=1e-6)  # type: ignore[arg-type]
    var = (sums[1] - sums[0] ** 2) * n / (n - 1)
    np.testing.assert_allclose(net.bn.running_var, var, rtol=1e-5)  # type: ignore[arg-type]


def check_torchs_layer_keeps_its_own_group(world: Communicator) -> None:
    alone = [torch.distributed.new_group([rank]) for rank in range(world.size)][world.rank]
    layer = nn.SyncBatchNorm(3, process_group=alone)
    assert MultiBNLayerSync().apply(layer).process_group is alone
    assert MultiBNLayerSync().revert(layer).process_group is alone


class Sharded(Net):
    """Does what `configure` does to the network, then shards its last layer."""

    configure: Any = staticmethod(lambda net: net)

    def configure_model(self) -> None:
        self.configure(self)
        if not isinstance(self.head, FSDPModule):
            fully_shard(self.head, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class NeverApplies(DDPStrategy):
    def setup(self, trainer: Any) -> None:
        plugin, self._layer_sync = self._layer_sync, None
        super().setup(trainer)
        self._layer_sync = plugin


def check_a_strategy_that_applies_no_plugin_is_refused(world: Communicator) -> None:
    """It is not if the module has converted its layers, or has applied the plugin."""

    def strategy(kind: Any = ModelParallelStrategy) -> Any:
        own = {"data_parallel_size": world.size, "tensor_parallel_size": 1}
        options = {} if kind is NeverApplies else own | {"save_distributed_checkpoint": False}
        return kind(process_group_backend="gloo", **options)

    for kind, make in ((ModelParallelStrategy, Sharded), (NeverApplies, Net)):
        message = rf"{kind.__name__} does not apply .* 1 layer.* bn .BatchNorm1d.*configure_model"
        with pytest.raises(RuntimeError, match=message):
            _fit(world, _loader(), strategy=strategy(kind), max_steps=1, make=make)
    plugin = MultiBNLayerSync()
    for configure in (convert_sync_batchnorm, plugin.apply):
        network: Any = type("Configured", (Sharded,), {"configure": staticmethod(configure)})
        options = {"strategy": strategy(), "plugins": [plugin], "make": network}
        assert _fit(world, _loader(), max_steps=1, **options).classes == {SyncBatchNorm1d}


class Doubled(pl.LightningDataModule):
    """Its own hook takes the place of the network's."""

    def train_dataloader(self) -> Any:
        return _loader()

    def val_dataloader(self) -> Any:
        return _loader(shuffle=False)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1]


def check_precise_bn_sees_the_batches_of_a_data_module(world: Communicator) -> None:
    net = _fit(world, Doubled(), PreciseBN(), max_epochs=1)
    mean = (_data().double() + 1).mean(0).float()
    np.testing.assert_allclose(net.bn.running_mean, mean, rtol=1e-6)  # type: ignore[arg-type]


def check_precise_bn_runs_before_validation_and_checkpoints(world: Communicator) -> None:
    """Every second epoch and the last, in whatever order the callbacks are given."""
    with tempfile.TemporaryDirectory() as directory:
        precise = PreciseBN(every_n_epochs=2)
        checkpoints = ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
        net = _fit(world, _loader(), checkpoints, precise, max_epochs=3)
        saved = [
            torch.load(Path(directory, f"epoch={epoch}.ckpt"), weights_only=False)["state_dict"]
            for epoch in range(3)
            if world.rank == 0  # the only one that saves
        ]
    steps = len(net.validated) // 3
    assert [_exact(*net.validated[epoch * steps]) for epoch in range(3)] == [False, True, True]
    if world.rank == 0:
        exact = [_exact(s["bn.running_mean"], s["bn.running_var"]) for s in saved]
        assert exact == [False, True, True]


class Stream(IterableDataset[Any]):
    """This rank's share, without a length."""

    def __init__(self, world: Communicator) -> None:
        self.share = slice(world.rank, None, world.size)

    def __iter__(self) -> Iterator[Any]:
        return iter([[x] for x in _data()[self.share]])


def check_a_loader_needs_no_length(world: Communicator) -> None:
    loader = DataLoader(Stream(world), BATCH_SIZE)
    net = _fit(world, loader, PreciseBN(), max_epochs=1)
    assert _exact(*net.validated[0])


def check_limits_precision_and_forward_fn_hold(world: Communicator) -> None:
    shown: list[Any] = []

    def forward(net: Any, batch: Any) -> None:
        shown.append((net.bn.training, torch.is_autocast_enabled("cpu")))
        net(batch[0])

    precise = PreciseBN(num_samples=6 * BATCH_SIZE, forward_fn=forward)
    limits: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 2}
    net = _fit(world, _loader(), precise, precision="bf16-mixed", **limits)
    assert shown == [(True, True)] * 6
    assert len(net.batches) == 4


def check_persistent_workers_go_on_with_training(world: Communicator) -> None:
    loader = _loader(num_workers=1, persistent_workers=True)
    net = _fit(world, loader, PreciseBN(num_samples=1), max_epochs=2)
    assert len(net.batches) == 2 * -(-SAMPLES // world.size // BATCH_SIZE)


def check_our_plugin_reverts_to_the_original_classes(world: Communicator) -> None:
    """Lightning's plugin knows nn.SyncBatchNorm only; ours brings the classes back."""
    model: Any = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    converted = type(model[0])
    assert type(TorchSyncBatchNorm().revert(model)[0]) is converted is not nn.BatchNorm2d  # type: ignore[index]
    assert type(MultiBNLayerSync().revert(model)[0]) is nn.BatchNorm2d  # type: ignore[index]


def check_lightnings_sync_batchnorm_beside_ours_is_refused(world: Communicator) -> None:
    with pytest.raises(MisconfigurationException, match=r"sync_batchnorm=True.*MultiBNLayerSync"):
        _fit(world, _loader(), sync_batchnorm=True, max_steps=1)
