"""The hook and the registered layers in mmengine's own Runner.

Started by torchrun, with `launcher="none"` and a group that is there already: mmengine's own
start-up calls torch.cuda.set_device, which torch for CPU lacks.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm


@contextlib.contextmanager
def frameworks_warnings() -> Iterator[None]:
    """Let a framework warn, about torch's deprecations and its own settings; multibn may not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="multibn")
        yield


with frameworks_warnings():
    from mmengine.hooks import Hook
    from mmengine.model import BaseDataPreprocessor, BaseModel, MMDistributedDataParallel
    from mmengine.registry import HOOKS, MODELS
    from mmengine.runner import Runner

    from multibn.torch_backend.integrations.mmengine import PreciseBNHook

SAMPLES = 20
BATCH_SIZE = 3


class Doubling(BaseDataPreprocessor):  # type: ignore[misc, unused-ignore]
    """Stands for normalization, with a batch augmentation that is for training only."""

    def forward(self, data: Any, training: bool = False) -> Any:
        offset = 100.0 if training else 0.0
        return {**data, "inputs": 2 * data["inputs"] + offset}


class Net(BaseModel):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__(data_preprocessor=Doubling())
        torch.manual_seed(0)
        self.bn = MODELS.build({"type": "MultiBN1d", "num_features": 3})
        self.head = nn.Linear(3, 1)
        self.shown: list[Any] = []  # in passes without gradients
        self.num_trained = 0

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        assert mode == "loss"  # the only one that training needs a model to have
        if torch.is_grad_enabled():
            self.num_trained += 1
        else:
            self.shown.append(inputs.detach().clone())
        return {"loss": (self.head(self.bn(inputs))[:, 0] - data_samples).square().mean()}


class Passes(Hook):  # type: ignore[misc, unused-ignore]
    """Notes after which iterations the statistics had been replaced, before EMA has seen them."""

    priority = 45  # between ABOVE_NORMAL and NORMAL

    def __init__(self) -> None:
        self.after: list[int] = []
        self._seen = 0

    def after_train_iter(self, runner: Any, *arguments: Any, **options: Any) -> None:
        shown = len(runner.model.module.shown)
        if shown > self._seen:
            self.after.append(runner.iter + 1)
        self._seen = shown


def _data() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"inputs": 5 + 2 * torch.randn(3, generator=generator), "data_samples": float(i % 2)}
        for i in range(SAMPLES)
    ]


def _population() -> tuple[Any, Any]:
    x = 2 * np.array([sample["inputs"].double().numpy() for sample in _data()])
    return x.mean(0), x.var(0, ddof=1)


def _train(
    name: str,
    directory: str,
    hook: dict[str, Any],
    sampler: str = "DefaultSampler",
    loader: dict[str, Any] | None = None,
    by_epoch: bool = True,
    **train_cfg: Any,
) -> tuple[Any, list[int]]:
    """A runner that has trained, and the iterations after which there was a precise pass."""
    passes = Passes()
    with frameworks_warnings():
        runner = Runner(
            model=MMDistributedDataParallel(Net()),
            work_dir=directory,
            experiment_name=name,
            log_level="ERROR",
            train_dataloader={
                "dataset": _data(),
                "batch_size": BATCH_SIZE,
                "num_workers": 0,
                "sampler": {"type": sampler, "shuffle": True},
                "collate_fn": {"type": "default_collate"},
                **(loader or {}),
            },
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
            train_cfg={"by_epoch": by_epoch, **train_cfg},
            default_hooks={
                "checkpoint": {"type": "CheckpointHook", "interval": 1, "by_epoch": by_epoch}
            },
            custom_hooks=[
                {"type": "EMAHook"},
                {"type": "PreciseBNHook", "progress": False, **hook},
                passes,
            ],
        )
        runner.train()
    return runner, passes.after


def _saved(directory: str, name: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(Path(directory, name), weights_only=False)
    return checkpoint


def _iterations(world: Communicator) -> int:
    return -(-SAMPLES // world.size // BATCH_SIZE)


def check_by_epoch(world: Communicator) -> None:
    """Every second epoch and the last; checkpoints and the averaged model have the statistics."""
    with tempfile.TemporaryDirectory() as directory:
        runner, after = _train(
            "by_epoch", directory, {"interval": 2, "num_samples": None}, max_epochs=3
        )
        files = {
            epoch: _saved(directory, f"epoch_{epoch}.pth")
            for epoch in (1, 2, 3)
            if world.rank == 0  # the only one that saves
        }
    expected = _population()
    assert after == [2 * _iterations(world), 3 * _iterations(world)]
    np.testing.assert_allclose(runner.model.module.bn.running_mean, expected[0], rtol=1e-6)
    np.testing.assert_allclose(runner.model.module.bn.running_var, expected[1], rtol=1e-6)
    for epoch, checkpoint in files.items():
        for part, bn in (("state_dict", "bn"), ("ema_state_dict", "module.bn")):
            mean, var = (checkpoint[part][f"{bn}.running_{name}"] for name in ("mean", "var"))
            close = np.allclose(mean, expected[0], 1e-6) and np.allclose(var, expected[1], 1e-6)
            assert close == (epoch > 1), epoch


def check_by_iteration(world: Communicator) -> None:
    """With an endless sampler: every second iteration and the last, on so many batches."""
    with tempfile.TemporaryDirectory() as directory:
        runner, after = _train(
            "by_iteration",
            directory,
            {"interval": 2, "by_epoch": False, "num_samples": None, "num_iters": 4},
            sampler="InfiniteSampler",
            by_epoch=False,
            max_iters=5,
        )
        saved = _saved(directory, "iter_5.pth") if world.rank == 0 else None
    net = runner.model.module
    last = torch.cat(net.shown[-4:]).double()
    sums = world.allreduce(torch.stack([last.sum(0), last.square().sum(0)]))
    n = 4 * BATCH_SIZE * world.size
    mean, var = sums[0] / n, (sums[1] / n - (sums[0] / n) ** 2) * n / (n - 1)
    assert after == [2, 4, 5]
    assert len(net.shown) == 3 * 4
    np.testing.assert_allclose(net.bn.running_mean, mean, rtol=1e-6)
    np.testing.assert_allclose(net.bn.running_var, var, rtol=1e-5)
    if saved:
        np.testing.assert_allclose(saved["state_dict"]["bn.running_var"], var, rtol=1e-5)


def check_number_of_samples(world: Communicator) -> None:
    """Counted over all ranks, in whole batches."""
    with tempfile.TemporaryDirectory() as directory:
        runner, after = _train("samples", directory, {"num_samples": 7}, max_epochs=1)
    assert after == [_iterations(world)]
    assert len(runner.model.module.shown) == -(-7 // (BATCH_SIZE * world.size))


def check_persistent_workers_go_on_with_training(world: Communicator) -> None:
    """A second loop over such a loader would restart the training loop's own iterator."""
    with tempfile.TemporaryDirectory() as directory:
        runner, after = _train(
            "workers",
            directory,
            {"num_samples": 3},
            loader={"num_workers": 1, "persistent_workers": True},
            max_epochs=2,
        )
    assert after == [_iterations(world), 2 * _iterations(world)]
    assert runner.model.module.num_trained == 2 * _iterations(world)


def check_registered_layers(world: Communicator) -> None:
    for name in ("MultiBN", "MultiBN1d", "MultiBN2d", "MultiBN3d"):
        # As mmcv's build_norm_layer does it.
        config = {"eps": 1e-3, "weighting": "rank", "process_group": "machine"}
        layer: Any = MODELS.get(name)(4, **config)
        assert type(layer) is SyncBatchNorm
        assert (layer.num_features, layer.eps, layer.weighting) == (4, 1e-3, "rank")
    assert HOOKS.get("PreciseBNHook") is PreciseBNHook
    with pytest.raises(ValueError, match="`interval` must be positive: got 0"):
        PreciseBNHook(interval=0)
    with pytest.raises(ValueError, match=r"`by_epoch=False` needs a limit.*got num_samples=N"):
        PreciseBNHook(by_epoch=False, num_samples=None)
