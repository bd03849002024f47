"""mmengine: synchronized layers for `norm_cfg`, and a hook for precise batch norm.

Both are in the scope "multibn" (multibn/registry.py), so that a config of mmpretrain, mmdet or any
other project names them alike and needs no import::

    norm_cfg = dict(type="multibn.SyncBatchNorm")
    custom_hooks = [dict(type="multibn.PreciseBNHook", num_samples=8192)]

Further arguments of the layer may follow `type`: process_group="machine" shares statistics inside
each machine. Without the scope, "PreciseBNHook" is another class in mmpretrain's configs.
"""

from contextlib import nullcontext
from typing import Any, Literal

from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMSeparateDistributedDataParallel, is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from multibn._typing import check_choice, check_int
from multibn.registry import HOOKS, MODELS
from multibn.torch_backend.layer.modules import SyncBatchNorm
from multibn.torch_backend.precise_bn import Estimator, check_arguments, run_pass, second_reader

MODELS.register_module(module=SyncBatchNorm)

# Each loop over such a sampler begins anew. Others, such as InfiniteSampler, may share a generator
# between loops, and the end of a second loop would end the training's.
_RESTARTING = DefaultSampler, DistributedSampler, RandomSampler, SequentialSampler

_SHOWN = 5  # names of layers in a log message


@HOOKS.register_module()
class PreciseBNHook(Hook):
    """Replaces running statistics by those of training data under the current weights.

    Runs after every `interval` epochs or iterations of training, before EMAHook copies buffers and
    CheckpointHook saves. The batches come from a loop of its own over `runner.train_dataloader`.
    Where such a loop could disturb the training's, as with InfiniteSampler, they are the next ones
    of IterBasedTrainLoop's endless stream. They pass through `model.data_preprocessor(batch,
    training=False)`, without batch augmentations. The model runs as in training, and in the
    optimizer wrapper's precision. `runner.logger` gets the numbers of updated layers and batches,
    and the names of layers that keep their statistics.
    Collective: every rank runs it at the same time.

    Parameters
    ----------
    num_samples, num_iters, estimator, progress
        As `multibn.torch_backend.update_bn_stats`; `num_samples` is over all ranks, and a batch
        counts as the loader's `batch_size`. Data with fewer samples is taken whole.
    interval
        Epochs or iterations from one pass to the next.
    by_epoch
        Whether `interval` counts epochs. Default: iterations in IterBasedTrainLoop, else epochs.
    at_end
        Whether there is a pass after the last epoch or iteration in any case.
    mode
        The `mode` with which the model runs, such as "loss" or "tensor". Default: "loss", as in
        training; a model that is trained by a `train_step` of its own runs without `mode`.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or value than those above. Before the first iteration: if
        `by_epoch` is True in IterBasedTrainLoop, or if the batches never end and there is neither
        `num_samples` nor `num_iters`.

    Examples
    --------
    >>> from mmengine.registry import HOOKS
    >>> hook = HOOKS.build({"type": "multibn.PreciseBNHook", "num_samples": 1024, "interval": 5})
    >>> hook.interval, hook.by_epoch  # epochs or iterations: the loop decides
    (5, None)
    """

    priority = "ABOVE_NORMAL"

    def __init__(
        self,
        num_samples: int | None = 8192,
        interval: int = 1,
        *,
        num_iters: int | None = None,
        by_epoch: bool | None = None,
        at_end: bool = False,
        mode: str | None = None,
        estimator: Estimator = "population",
        progress: bool = True,
    ) -> None:
        check_arguments(num_samples, num_iters, estimator)
        check_int("interval", interval)
        check_choice("by_epoch", by_epoch, Literal[None, True, False])
        if not isinstance(mode, str | None):
            raise TypeError(f"`mode` must be a str, or None for the training's: got {mode!r}.")
        self.num_samples = num_samples
        self.interval = interval
        self.num_iters = num_iters
        self.by_epoch = by_epoch
        self.at_end = at_end
        self.mode = mode
        self.estimator: Estimator = estimator
        self.progress = progress
        self._short_data_logged = False

    def before_train(self, runner: Any) -> None:
        """Refuse arguments that cannot work in this train loop."""
        loop = type(runner.train_loop).__name__
        if self.by_epoch and isinstance(runner.train_loop, IterBasedTrainLoop):
            raise ValueError(
                f"`by_epoch` must be False or None in a loop without epochs: got True in {loop}. "
                "Count `interval` in iterations."
            )
        if self.num_samples is None and self.num_iters is None and _stream(runner) is not None:
            raise ValueError(
                f"`num_samples` or `num_iters` must be an int, as the batches of {loop} never end: "
                "got None for both."
            )

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        # Not after_train_epoch: EMAHook copies buffers in this stage only.
        by_epoch = self.by_epoch
        if by_epoch is None:
            by_epoch = not isinstance(runner.train_loop, IterBasedTrainLoop)
        if by_epoch:
            due = self.end_of_epoch(runner.train_dataloader, batch_idx) and (
                self.every_n_epochs(runner, self.interval)
                or (self.at_end and self.is_last_train_epoch(runner))
            )
        else:
            due = self.every_n_train_iters(runner, self.interval) or (
                self.at_end and self.is_last_train_iter(runner)
            )
        if due:
            self.update(runner)

    def update(self, runner: Any) -> None:
        """Run precise batch norm now. Collective."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        options = _options(runner, self.mode)
        wrapper = runner.optim_wrapper
        precision = (
            wrapper.optim_context(model) if isinstance(wrapper, OptimWrapper) else nullcontext()
        )

        def forward(model: Any, batch: Any) -> None:
            if preprocess := getattr(model, "data_preprocessor", None):
                batch = preprocess(batch, False)
            if isinstance(batch, dict):
                model(**batch, **options)
            else:
                model(*batch, **options)

        loader = runner.train_dataloader
        stream = _stream(runner)
        batch_size = _batch_size(loader)
        limits = ((self.num_samples, "samples of all ranks"), (self.num_iters, "batches per rank"))
        amounts = [f"{limit} {unit}" for limit, unit in limits if limit is not None]
        amount = " or ".join(amounts) or "all training data"
        runner.logger.info(f"Precise batch norm starts, on {amount}.")
        with precision:
            report = run_pass(
                model,
                second_reader(loader) if stream is None else stream,
                num_samples=self.num_samples,
                num_iters=self.num_iters,
                estimator=self.estimator,
                forward_fn=forward,
                progress=self.progress,
                samples_in=None if batch_size is None else lambda batch: batch_size,
            )
        if report.updated:
            runner.logger.info(
                f"Precise batch norm ends: {len(report.updated)} layer(s) have the statistics of "
                f"{report.num_batches} batch(es) on each rank."
            )
        else:
            runner.logger.warning("Precise batch norm ends: there was no batch norm to update.")
        if others := report.unseen + report.others:
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            runner.logger.info(
                "Precise batch norm leaves these layers as they were (frozen, without input, or "
                f"no batch norm): {', '.join(others[:_SHOWN])}{more}."
            )
        if report.early_end and not self._short_data_logged:
            self._short_data_logged = True
            runner.logger.info(
                f"Precise batch norm takes all training data, which is less than {amount}."
            )


def _options(runner: Any, mode: str | None) -> dict[str, str]:
    """How the model is called: in its mode "loss", if this is how it is trained."""
    trained = runner.model
    if isinstance(trained, MMSeparateDistributedDataParallel):
        trained = trained.module
    if mode is None and (
        is_model_wrapper(trained)
        or getattr(type(trained), "train_step", None) is BaseModel.train_step
    ):
        mode = "loss"
    return {} if mode is None else {"mode": mode}


def _batch_size(loader: Any) -> int | None:
    """The loader's own, because a batch of pseudo_collate is a list of samples."""
    samplers = loader, getattr(loader, "batch_sampler", None)
    return next((size for s in samplers if (size := getattr(s, "batch_size", None))), None)


def _stream(runner: Any) -> Any:
    """IterBasedTrainLoop's endless iterator, if a loop beside it could end it, else None."""
    loader: Any = runner.train_dataloader
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is BatchSampler and isinstance(batches.sampler, _RESTARTING):
        return None
    return getattr(runner.train_loop, "dataloader_iterator", None)
