"""The hook and the registered layers in mmengine's own Runner.

Started by torchrun, with `launcher="none"` and a group that is there already: mmengine's own
start-up calls torch.cuda.set_device, which torch for CPU lacks.
"""

import contextlib
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.torch_backend import convert_sync_batchnorm, revert_sync_batchnorm
from tests.harness.runs import on

RUNS = on("torchrun", 1, 2, needs="torch mmengine")


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
    from mmengine.model import revert_sync_batchnorm as mmengine_revert
    from mmengine.optim import AmpOptimWrapper, OptimWrapper
    from mmengine.registry import MODELS
    from mmengine.runner import Runner

SAMPLES = 20
BATCH_SIZE = 3


class Doubling(BaseDataPreprocessor):  # type: ignore[misc, unused-ignore]
    """Stands for normalization, with a batch augmentation that is for training only."""

    def forward(self, data: Any, training: bool = False) -> Any:
        offset = 100.0 if training else 0.0
        if isinstance(data["inputs"], list):  # by pseudo_collate
            data = {name: torch.stack([*map(torch.as_tensor, v)]) for name, v in data.items()}
        return {**data, "inputs": 2 * data["inputs"] + offset}


class Net(BaseModel):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__(data_preprocessor=Doubling())
        torch.manual_seed(0)
        self.bn = MODELS.build({"type": "multibn.SyncBatchNorm", "num_features": 3})
        self.head = nn.Linear(3, 1)
        self.shown: list[Any] = []  # in passes without gradients
        self.num_trained = 0
        self.passes: set[tuple[bool, bool]] = set()  # whether with gradients, and under autocast

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        assert mode == "loss"  # the only one that training needs a model to have
        return {"loss": (self.output(inputs) - data_samples).square().mean()}

    def output(self, inputs: Any) -> Any:
        self.passes.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        if torch.is_grad_enabled():
            self.num_trained += 1
        else:
            self.shown.append(inputs.detach().clone())
        return self.head(self.bn(inputs))[:, 0]


class Amp(AmpOptimWrapper):  # type: ignore[misc, unused-ignore]
    """mmengine's, without its demand for a GPU, which a scaler of the loss needs."""

    def __init__(self, **options: Any) -> None:
        OptimWrapper.__init__(self, **options)
        self.cast_dtype = torch.bfloat16
        self.loss_scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._scale_update_param = None


class WithItsOwnStep(Net):
    """A model without a mode "loss"."""

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        assert mode == "tensor"
        return self.output(inputs)

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        loss = self(**self.data_preprocessor(data, True)).square().mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss}


class Passes(Hook):  # type: ignore[misc, unused-ignore]
    """Notes after which iterations the statistics had been replaced, before EMA has seen them."""

    priority = 45  # between ABOVE_NORMAL and NORMAL

    def __init__(self) -> None:
        self.after: list[int] = []
        self._seen = 0

    def after_train_iter(self, runner: Any, *arguments: Any, **options: Any) -> None:
        shown = len(getattr(runner.model, "module", runner.model).shown)
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


def _assert_population(runner: Any) -> None:
    bn = runner.model.module.bn
    for got, expected in zip((bn.running_mean, bn.running_var), _population(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


_numbers = itertools.count()


def _train(
    hook: dict[str, Any],
    directory: str = "",
    sampler: str = "DefaultSampler",
    loader: dict[str, Any] | None = None,
    by_epoch: bool = True,
    model: Any = None,
    wrapper: Any = OptimWrapper,
    **train_cfg: Any,
) -> tuple[Any, list[int]]:
    """A runner that has trained, and the iterations after which there was a precise pass."""
    passes = Passes()
    with frameworks_warnings(), tempfile.TemporaryDirectory() as own:
        runner = Runner(
            model=model or MMDistributedDataParallel(Net()),
            work_dir=directory or own,
            experiment_name=f"checks_{next(_numbers)}",
            log_level="ERROR",
            train_dataloader={
                "dataset": _data(),
                "batch_size": BATCH_SIZE,
                "num_workers": 0,
                "sampler": {"type": sampler, "shuffle": True},
                "collate_fn": {"type": "default_collate"},
                **(loader or {}),
            },
            optim_wrapper={"type": wrapper, "optimizer": {"type": "SGD", "lr": 0.01}},
            train_cfg={"by_epoch": by_epoch, **train_cfg},
            default_hooks={
                "checkpoint": {"type": "CheckpointHook", "interval": 1, "by_epoch": by_epoch}
            },
            custom_hooks=[{"type": "EMAHook"}, {"type": "multibn.PreciseBNHook", **hook}, passes],
        )
        runner.train()
    return runner, passes.after


def _saved(directory: str, name: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(Path(directory, name), weights_only=False)
    return checkpoint


def _iterations(world: Communicator) -> int:
    return -(-SAMPLES // world.size // BATCH_SIZE)


def check_the_hook_runs_every_second_epoch(world: Communicator) -> None:
    """Checkpoints and the averaged model have the statistics."""
    with tempfile.TemporaryDirectory() as directory:
        runner, after = _train({"interval": 2}, directory, max_epochs=2)
        files = {
            epoch: _saved(directory, f"epoch_{epoch}.pth")
            for epoch in (1, 2)
            if world.rank == 0  # the only one that saves
        }
    expected = _population()
    assert after == [2 * _iterations(world)]
    _assert_population(runner)
    for epoch, checkpoint in files.items():
        for part, bn in (("state_dict", "bn"), ("ema_state_dict", "module.bn")):
            mean, var = (checkpoint[part][f"{bn}.running_{name}"] for name in ("mean", "var"))
            close = np.allclose(mean, expected[0], 1e-6) and np.allclose(var, expected[1], 1e-6)
            assert close == (epoch > 1), epoch


def check_the_hook_runs_every_second_iteration(world: Communicator) -> None:
    """It runs on the next batches of the training where the sampler is endless."""
    runner, after = _train(
        {"interval": 2, "num_samples": 4 * BATCH_SIZE * world.size},
        sampler="InfiniteSampler",
        by_epoch=False,
        max_iters=4,
    )
    net = runner.model.module
    last = torch.cat(net.shown[-4:]).double()
    sums = world.allreduce(torch.stack([last.sum(0), last.square().sum(0)]))
    n = 4 * BATCH_SIZE * world.size
    mean, var = sums[0] / n, (sums[1] / n - (sums[0] / n) ** 2) * n / (n - 1)
    assert after == [2, 4]
    assert len(net.shown) == 2 * 4
    np.testing.assert_allclose(net.bn.running_mean, mean, rtol=1e-6)
    np.testing.assert_allclose(net.bn.running_var, var, rtol=1e-5)


def check_samples_are_counted_over_all_ranks(world: Communicator) -> None:
    """Counted over all ranks, in whole batches; a batch may be a list of samples."""
    for collate in ("default_collate", "pseudo_collate"):
        runner, after = _train(
            {"num_samples": 5},
            loader={"batch_size": 2, "collate_fn": {"type": collate}},
            max_epochs=1,
        )
        assert after == [SAMPLES // world.size // 2]
        assert len(runner.model.module.shown) == -(-5 // (2 * world.size))


def check_persistent_workers_go_on_with_training(world: Communicator) -> None:
    """A second loop over such a loader would restart the training loop's own iterator."""
    runner, after = _train(
        {"num_samples": 3}, loader={"num_workers": 1, "persistent_workers": True}, max_epochs=2
    )
    assert after == [_iterations(world), 2 * _iterations(world)]
    assert runner.model.module.num_trained == 2 * _iterations(world)


def check_a_pass_takes_all_data_whatever_training_has_seen(world: Communicator) -> None:
    runner, after = _train(
        {"interval": 2},
        loader={"batch_size": 2},
        by_epoch=False,
        max_iters=4,  # fewer than the data has, after which mmengine sleeps for 2 s
    )
    assert after == [2, 4]
    _assert_population(runner)


def check_a_model_may_have_a_step_of_its_own(world: Communicator) -> None:
    """Runs in its default mode, on all data, as there are fewer samples than `num_samples`."""
    net, iterations = WithItsOwnStep(), _iterations(world)
    _, after = _train({}, model=net, max_epochs=2)
    assert after == [iterations, 2 * iterations]
    assert len(net.shown) == 2 * iterations


def check_a_pass_runs_in_the_precision_of_training(world: Communicator) -> None:
    runner, _ = _train({}, wrapper=Amp, max_epochs=1)
    assert runner.model.module.passes == {(True, True), (False, True)}
    _assert_population(runner)


def check_our_function_reverts_to_the_original_classes(world: Communicator) -> None:
    """mmengine's function knows nn.SyncBatchNorm only; ours brings the classes back."""
    model: Any = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    converted = type(model[0])
    with frameworks_warnings():
        assert type(mmengine_revert(model)[0]) is converted is not nn.BatchNorm2d  # type: ignore[index, unused-ignore]
    assert type(revert_sync_batchnorm(model)[0]) is nn.BatchNorm2d
