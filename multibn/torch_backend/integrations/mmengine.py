"""mmengine: layers for `norm_cfg`, and a hook for precise batch norm.

Importing this module registers them::

    custom_imports = dict(imports=["multibn.torch_backend.integrations.mmengine"])
    norm_cfg = dict(type="MultiBN")
    custom_hooks = [dict(type="PreciseBNHook", num_samples=8192)]

The types MultiBN, MultiBN1d, MultiBN2d and MultiBN3d are all `SyncBatchNorm`. Its other arguments
may follow `type`: process_group="machine" shares statistics inside each machine.
"""

from contextlib import nullcontext
from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODELS

from multibn.torch_backend.modules import SyncBatchNorm
from multibn.torch_backend.precise_bn import Estimator, second_reader, update_bn_stats

MODELS.register_module(
    name=["MultiBN", "MultiBN1d", "MultiBN2d", "MultiBN3d"], module=SyncBatchNorm
)


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Replaces running statistics by those of training data under the current weights.

    Runs after an epoch or iteration, and at the end of training in any case, before EMAHook copies
    buffers and CheckpointHook saves. The batches are those of `runner.train_dataloader`, in
    IterBasedTrainLoop the next ones of its endless stream. They pass through
    `model.data_preprocessor(batch, training=False)`, without batch augmentations. The model runs
    as in training, with mode="loss" and in the optimizer wrapper's precision.
    Collective: every rank runs it at the same time.

    Parameters
    ----------
    num_samples, num_iters, estimator, progress
        As `multibn.torch_backend.update_bn_stats`; `num_samples` is over all ranks.
    interval, by_epoch
        Runs every `interval` epochs; iterations if `by_epoch` is False, for IterBasedTrainLoop.

    Raises
    ------
    ValueError
        If `interval` is not positive, or `by_epoch` is False and both limits are None.
    """

    priority = "ABOVE_NORMAL"

    def __init__(
        self,
        num_samples: int | None = 8192,
        num_iters: int | None = None,
        interval: int = 1,
        by_epoch: bool = True,
        estimator: Estimator = "population",
        progress: bool = True,
    ) -> None:
        if interval <= 0:
            raise ValueError(f"`interval` must be positive: got {interval}.")
        if not by_epoch and num_samples is None and num_iters is None:
            raise ValueError(
                "`by_epoch=False` needs a limit, as the batches of IterBasedTrainLoop never end: "
                "got num_samples=None and num_iters=None. Pass one of them."
            )
        self.interval = interval
        self.by_epoch = by_epoch
        self.options: dict[str, Any] = {
            "num_samples": num_samples,
            "num_iters": num_iters,
            "estimator": estimator,
            "progress": progress,
        }

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        # Not after_train_epoch: EMAHook copies buffers in this stage only.
        if self.by_epoch:
            due = self.end_of_epoch(runner.train_dataloader, batch_idx) and (
                self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)
            )
        else:
            due = self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner)
        if due:
            self.update(runner)

    def update(self, runner: Any) -> None:
        """Run precise batch norm now. Collective."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        wrapper = runner.optim_wrapper
        precision = (
            wrapper.optim_context(model) if isinstance(wrapper, OptimWrapper) else nullcontext()
        )

        def forward(model: Any, batch: Any) -> None:
            batch = model.data_preprocessor(batch, False)
            if isinstance(batch, dict):
                model(**batch, mode="loss")
            else:
                model(*batch, mode="loss")

        # A second iterator over an InfiniteSampler would close the first one's generator.
        stream = getattr(runner.train_loop, "dataloader_iterator", None)
        batches = second_reader(runner.train_dataloader) if stream is None else stream
        with precision:
            update_bn_stats(model, batches, forward_fn=forward, **self.options)
