"""mmengine: synchronized layers for `norm_cfg`, and a hook for precise batch norm.

Both are in the scope "multibn" (multibn/registry.py). A config of mmpretrain, mmdet or any other
project uses the same names and needs no import::

    norm_cfg = dict(type="multibn.SyncBatchNorm")
    custom_hooks = [dict(type="multibn.PreciseBNHook", num_samples=8192)]

Other arguments of the layer may follow `type`: process_group="machine" shares statistics inside
each machine. Without the scope, "PreciseBNHook" in a config of mmpretrain is a different class.
"""

import warnings
from contextlib import nullcontext
from typing import Any

from mmengine.dataset import DefaultSampler
from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMSeparateDistributedDataParallel, is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.runner import IterBasedTrainLoop
from torch.utils import data

from multibn._typing import check_choice, check_int
from multibn.registry import HOOKS, MODELS
from multibn.torch_backend.integrations.loaders import second_reader
from multibn.torch_backend.layer.modules import SyncBatchNorm
from multibn.torch_backend.precise_bn import Estimator, update_bn_stats

MODELS.register_module(module=SyncBatchNorm)

# Each loop over one of these samplers starts from the beginning. Loops over others, such as
# InfiniteSampler, may share a generator, and the end of a second loop would end the training.
_RESTARTING = DefaultSampler, data.DistributedSampler, data.RandomSampler, data.SequentialSampler


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Replaces running statistics by statistics of the training data with the current weights.

    Runs after every `interval` epochs or iterations of training, before EMAHook copies buffers and
    CheckpointHook saves. The batches come from a separate loop over `runner.train_dataloader`. If
    that loop could disturb training (InfiniteSampler), they are the next batches of
    IterBasedTrainLoop's endless iterator. They pass through `model.data_preprocessor(batch,
    False)`, without batch augmentations. The model runs as in training, in the optimizer wrapper's
    precision, and with mode="loss" unless the model overrides `train_step`. A warning names layers
    that had no input. Collective: every rank runs this hook at the same time.

    Parameters
    ----------
    num_samples
        Number of samples on all ranks together; every batch is counted as the loader's
        `batch_size` samples. If there is less data, all of it is used.
    interval
        Number of epochs between runs; with IterBasedTrainLoop, number of iterations.
    estimator
        As for `multibn.torch.update_bn_stats`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> from mmengine.registry import HOOKS
    >>> hook = HOOKS.build({"type": "multibn.PreciseBNHook", "num_samples": 1024, "interval": 5})
    >>> hook.interval  # epochs or iterations: the loop decides
    5
    """

    priority = "ABOVE_NORMAL"

    def __init__(
        self, num_samples: int = 8192, interval: int = 1, *, estimator: Estimator = "population"
    ) -> None:
        check_int("num_samples", num_samples)
        check_int("interval", interval)
        check_choice("estimator", estimator, Estimator)
        self.num_samples = num_samples
        self.interval = interval
        self.estimator: Estimator = estimator

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        # Not after_train_epoch, because EMAHook copies buffers in after_train_iter.
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            due = self.every_n_train_iters(runner, self.interval)
        else:
            is_last = self.end_of_epoch(runner.train_dataloader, batch_idx)
            due = is_last and self.every_n_epochs(runner, self.interval)
        if due:
            self.update(runner)

    def update(self, runner: Any) -> None:
        """Run precise batch norm now. Collective."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        options = _forward_options(runner)
        wrapper = runner.optim_wrapper
        has_precision = isinstance(wrapper, OptimWrapper)
        precision = wrapper.optim_context(model) if has_precision else nullcontext()

        def forward(model: Any, batch: Any) -> None:
            if preprocess := getattr(model, "data_preprocessor", None):
                batch = preprocess(batch, False)
            if isinstance(batch, dict):
                model(**batch, **options)
            else:
                model(*batch, **options)

        loader, stream = runner.train_dataloader, _endless_stream(runner)
        limit: Any = {"num_samples": self.num_samples}
        if batch_size := _batch_size(loader):
            limit = {"num_iters": -(-self.num_samples // (batch_size * get_world_size()))}
        number, unit = next(iter(limit.values())), "iterations" if batch_size else "samples"
        runner.logger.info(f"Precise batch norm over {number} {unit}.")
        with precision, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`num_.*ended after")  # then all samples are used
            batches = second_reader(loader) if stream is None else stream
            how: Any = {"estimator": self.estimator, "forward_fn": forward, "progress": False}
            update_bn_stats(model, batches, **how, **limit)


def _forward_options(runner: Any) -> dict[str, str]:
    """Return the model's keyword arguments: mode="loss", if it is trained in this mode."""
    trained = runner.model
    if isinstance(trained, MMSeparateDistributedDataParallel):
        trained = trained.module
    has_own_step = getattr(type(trained), "train_step", None) is not BaseModel.train_step
    return {} if has_own_step and not is_model_wrapper(trained) else {"mode": "loss"}


def _batch_size(loader: Any) -> int | None:
    """Return the loader's batch size; batches of pseudo_collate are lists of samples."""
    samplers = loader, getattr(loader, "batch_sampler", None)
    return next((size for s in samplers if (size := getattr(s, "batch_size", None))), None)


def _endless_stream(runner: Any) -> Any:
    """Return IterBasedTrainLoop's iterator if a second loop could end it, otherwise None."""
    loader: Any = runner.train_dataloader
    batches = loader.batch_sampler if isinstance(loader, data.DataLoader) else None
    if type(batches) is data.BatchSampler and isinstance(batches.sampler, _RESTARTING):
        return None
    return getattr(runner.train_loop, "dataloader_iterator", None)
