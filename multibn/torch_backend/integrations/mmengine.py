"""mmengine: synchronized layers for `norm_cfg`, and a hook for precise batch norm.

Both are in the scope "multibn" (multibn/registry.py), so that a config of mmpretrain, mmdet or any
other project names them alike and needs no import::

    norm_cfg = dict(type="multibn.SyncBatchNorm")
    custom_hooks = [dict(type="multibn.PreciseBNHook", num_samples=8192)]

Further arguments of the layer may follow `type`: process_group="machine" shares statistics inside
each machine. Without the scope, "PreciseBNHook" is another class in mmpretrain's configs.
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

# Each loop over such a sampler begins anew. Others, such as InfiniteSampler, may share a generator
# between loops, and the end of a second loop would end the training's.
_RESTARTING = DefaultSampler, data.DistributedSampler, data.RandomSampler, data.SequentialSampler


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Replaces running statistics by those of training data under the current weights.

    Runs after every `interval` epochs or iterations of training, before EMAHook copies buffers and
    CheckpointHook saves. The batches come from a loop of its own over `runner.train_dataloader`. If
    such a loop could disturb the training's (InfiniteSampler), the batches are the next ones of
    IterBasedTrainLoop's endless stream. They pass through `model.data_preprocessor(batch,
    training=False)`, without batch augmentations. The model runs as in training, with mode "loss"
    unless it has a `train_step` of its own, and in the optimizer wrapper's precision. Layers
    without an input are named in a warning. Collective: every rank runs it at the same time.

    Parameters
    ----------
    num_samples
        As of `multibn.torch.update_bn_stats`, over all ranks; a batch counts as the loader's
        `batch_size`. If there is less data, all of it is used.
    interval
        Epochs from one pass to the next, in IterBasedTrainLoop iterations.
    estimator
        As of `update_bn_stats`.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or value than those above.

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
        # Not after_train_epoch: EMAHook copies buffers in this stage only.
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
        limit = {"num_samples": self.num_samples}
        if batch_size := _batch_size(loader):
            limit = {"num_iters": -(-self.num_samples // (batch_size * get_world_size()))}
        number, unit = next(iter(limit.values())), "iterations" if batch_size else "samples"
        runner.logger.info(f"Precise batch norm over {number} {unit}.")
        with precision, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`num_.*ended after")  # fewer samples are all taken
            update_bn_stats(
                model,
                second_reader(loader) if stream is None else stream,
                estimator=self.estimator,
                forward_fn=forward,
                progress=False,
                **limit,
            )


def _forward_options(runner: Any) -> dict[str, str]:
    """How the model is called: in its mode "loss", if this is how it is trained."""
    trained = runner.model
    if isinstance(trained, MMSeparateDistributedDataParallel):
        trained = trained.module
    has_own_step = getattr(type(trained), "train_step", None) is not BaseModel.train_step
    return {} if has_own_step and not is_model_wrapper(trained) else {"mode": "loss"}


def _batch_size(loader: Any) -> int | None:
    """The loader's own, because a batch of pseudo_collate is a list of samples."""
    samplers = loader, getattr(loader, "batch_sampler", None)
    return next((size for s in samplers if (size := getattr(s, "batch_size", None))), None)


def _endless_stream(runner: Any) -> Any:
    """IterBasedTrainLoop's endless iterator, if a loop beside it could end it, else None."""
    loader: Any = runner.train_dataloader
    batches = loader.batch_sampler if isinstance(loader, data.DataLoader) else None
    if type(batches) is data.BatchSampler and isinstance(batches.sampler, _RESTARTING):
        return None
    return getattr(runner.train_loop, "dataloader_iterator", None)
