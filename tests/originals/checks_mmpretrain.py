"""mmpretrain's hook and ours in the same runs of mmengine's Runner, in mmpretrain's scope.

mmpretrain, mmaction and mmdet are imported in the checks only, which put their folder on the path.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from tests.harness.runs import on
from tests.helpers.require import ORIGINALS
from tests.programs import operators
from tests.torch_backend.integrations.checks_mmengine import frameworks_warnings

with frameworks_warnings():
    from mmengine.config import Config
    from mmengine.hooks import Hook
    from mmengine.model import MMDistributedDataParallel
    from mmengine.registry import DefaultScope
    from mmengine.runner import Runner

    from multibn.torch_backend.integrations.mmengine import PreciseBNHook

RUNS = on("torchrun", 2, needs="torch mmengine mmpretrain")


@contextlib.contextmanager
def openmmlab() -> Iterator[None]:
    """OpenMMLab's packages can be imported. Restores mmengine's default scope, which runs set."""
    with frameworks_warnings(), DefaultScope.overwrite_default_scope("mmengine"):
        sys.path.append(str(ORIGINALS))  # last: it has a package "tests", too
        try:
            operators.declare()
            yield
        finally:
            sys.path.remove(str(ORIGINALS))


def check_the_documented_words_work_in_each_scope(world: Communicator) -> None:
    """The documented words on the real registries of mmpretrain, mmaction and mmdet.

    mmaction2's wheel lacks a folder that its models import, and mmdet imports mmcv's compiled
    operators; their own hooks and models are therefore left out of the registries.
    """
    with openmmlab():
        build_norm_layer = import_module("mmcv.cnn").build_norm_layer
        theirs = {
            "mmpretrain": import_module("mmpretrain.engine").PreciseBNHook,
            "mmaction": None,
            "mmdet": None,
        }
        for scope, precise_bn_hook in theirs.items():
            registry: Any = import_module(f"{scope}.registry")
            if scope != "mmpretrain":
                registry.MODELS._imported = registry.HOOKS._imported = True
            with DefaultScope.overwrite_default_scope(scope):
                hook = registry.HOOKS.build({"type": "multibn.PreciseBNHook", "interval": 3})
                name, layer = build_norm_layer({"type": "multibn.SyncBatchNorm", "eps": 1e-3}, 4)
                assert registry.HOOKS.get("PreciseBNHook") is precise_bn_hook
                assert registry.HOOKS.get("mmengine.PreciseBNHook") is None
            assert (type(hook), hook.interval) == (PreciseBNHook, 3)
            assert (type(layer), layer.eps, name) == (SyncBatchNorm, 1e-3, "bn")


Statistics = list[tuple[Any, Any]]


class Recorder(Hook):  # type: ignore[misc, unused-ignore]
    """The passes since the last look of any Recorder, with the statistics they left."""

    priority = "ABOVE_NORMAL"  # that of both hooks; Recorders stand before, between and after them

    def __init__(self) -> None:
        self.passes: dict[int, Statistics] = {}

    def after_train_iter(self, runner: Any, *arguments: Any, **options: Any) -> None:
        self._look(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Any) -> None:
        self._look(runner, runner.iter)

    def _look(self, runner: Any, iteration: int) -> None:
        model = runner.model.module
        if model.shown:
            self.passes[iteration] = [
                (bn.running_mean.clone(), bn.running_var.clone()) for bn in batch_norms(model)
            ]
        model.shown = 0


def batch_norms(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


# The words of the README, in a config of mmpretrain, which has no collate_fn for images.
CONFIG = """
default_scope = "mmpretrain"
norm_cfg = dict(type="multibn.SyncBatchNorm")
model = dict(
    type="ImageClassifier",
    data_preprocessor=dict(type="ClsDataPreprocessor", mean=[0.1] * 3, std=[0.9] * 3),
    backbone=dict(
        type="ResNet_CIFAR", depth=18, stem_channels=4, base_channels=4, norm_cfg=norm_cfg,
        num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,)
    ),
    neck=dict(type="GlobalAveragePooling"),
    head=dict(type="LinearClsHead", num_classes=2, in_channels=4),
)
train_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type="DefaultSampler", shuffle=True)
)
"""


def _images(count: int) -> list[Any]:
    data_sample = import_module("mmpretrain.structures").DataSample
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "inputs": 1 + 2 * torch.randn(3, 8, 8, generator=generator),
            "data_samples": data_sample().set_gt_label(i % 2),
        }
        for i in range(count)
    ]


def _expect_equal_passes(
    images: int, norm_type: str, ours: Any, after: list[int], interval: int = 1, **train_cfg: Any
) -> None:
    """Train a network of mmpretrain with both hooks, ours first: equal passes, after `after`."""
    config = Config.fromstring(CONFIG, ".py")
    config.norm_cfg.type = config.model.backbone.norm_cfg.type = norm_type
    config.train_dataloader.dataset = _images(images)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        model = import_module("mmpretrain.registry").MODELS.build(config.model)
    kind = nn.BatchNorm2d if norm_type == "BN" else SyncBatchNorm
    assert {type(m) for m in batch_norms(model)} == {kind}
    model.shown = 0

    def count(module: Any, arguments: Any) -> None:
        module.shown += not torch.is_grad_enabled()

    model.register_forward_pre_hook(count)
    mine, others = Recorder(), Recorder()
    theirs = {"type": "PreciseBNHook", "num_samples": 16, "interval": interval}
    theirs["priority"] = "ABOVE_NORMAL"
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(
            model=MMDistributedDataParallel(model),
            work_dir=directory,
            experiment_name=f"{norm_type}_{after}",
            log_level="ERROR",
            default_scope="mmpretrain",
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
            custom_hooks=[ours, mine, theirs, others],
            train_dataloader=config.train_dataloader,
            train_cfg=train_cfg,
        )
        runner.train()
    assert list(others.passes) == list(mine.passes) == after
    for iteration in after:
        for expected, actual in zip(others.passes[iteration], mine.passes[iteration], strict=True):
            for value, found in zip(expected, actual, strict=True):
                np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def check_passes_by_epoch_equal_mmpretrains_own(world: Communicator) -> None:
    """A network of mmpretrain: its own hook's numbers, with its layers and with ours."""
    ours = {"type": "multibn.PreciseBNHook", "num_samples": 16, "interval": 1}
    ours["estimator"] = "mean_of_var"
    epoch = 24 // (4 * world.size)
    with openmmlab():
        for norm_type in ("BN", "multibn.SyncBatchNorm"):
            _expect_equal_passes(
                24, norm_type, dict(ours), [epoch, 2 * epoch], by_epoch=True, max_epochs=2
            )


def check_passes_by_iteration_equal_mmpretrains_own(world: Communicator) -> None:
    """The same two arguments, by position, and the same passes, every 5 iterations."""
    with openmmlab():
        for iterations, after in ((25, [5, 10, 15, 20, 25]), (8, [5])):
            ours = PreciseBNHook(16, 5, estimator="mean_of_var")
            _expect_equal_passes(
                100 * world.size, "BN", ours, after, 5, by_epoch=False, max_iters=iterations
            )
