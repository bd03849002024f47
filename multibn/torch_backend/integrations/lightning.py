"""Lightning: a plugin that synchronizes layers, and a callback for precise batch norm::

Trainer(plugins=[MultiBNLayerSync()], callbacks=[PreciseBN(num_samples=8192)], ...)
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn._typing import check_int, list_obstacles
from multibn.communicators import CommunicatorLike
from multibn.torch_backend import precise_bn
from multibn.torch_backend.convert.convert import convert_sync_batchnorm, revert_sync_batchnorm
from multibn.torch_backend.integrations.loaders import second_reader
from multibn.torch_backend.layer.base import SyncNormBase


class MultiBNLayerSync(LayerSync):
    """Synchronizes the batch norms of a model during `fit`, also on CPU.

    DDPStrategy and FSDPStrategy apply layer plugins. ModelParallelStrategy and DeepSpeedStrategy do
    not: there, call `apply` in the module's `configure_model`. `fit` raises RuntimeError if the
    plugin was not applied. After fitting, the layers have their original classes again (a
    `SyncBatchNorm` that the model had before becomes a `BatchNorm`). Do not also pass
    `sync_batchnorm=True` to the trainer.

    The parameters are those of `multibn.torch.convert_sync_batchnorm`, and invalid ones raise the
    same errors.

    Examples
    --------
    >>> from lightning.pytorch import Trainer
    >>> from torch import nn
    >>> from multibn.torch.lightning import MultiBNLayerSync
    >>> plugin = MultiBNLayerSync(weighting="sample")
    >>> trainer = Trainer(plugins=[plugin], accelerator="cpu", logger=False)
    >>> plugin.apply(nn.BatchNorm2d(8)).weighting  # the trainer calls `apply` in `fit`
    'sample'
    """

    def __init__(self, process_group: CommunicatorLike = None, **options: Any) -> None:
        convert_sync_batchnorm(nn.BatchNorm1d(1), process_group, **options)  # raises if invalid
        self.options = options
        self.process_group = process_group
        self.is_applied = False

    def apply(self, model: nn.Module) -> nn.Module:
        self.is_applied = True
        return convert_sync_batchnorm(model, self.process_group, **self.options)

    def revert(self, model: nn.Module) -> nn.Module:
        return revert_sync_batchnorm(model)


def _on_train_start(strategy: Strategy) -> None:
    """Raise if the strategy has a `MultiBNLayerSync` that was not applied to the model."""
    plugin, module = getattr(strategy, "_layer_sync", None), strategy.lightning_module
    if isinstance(plugin, MultiBNLayerSync) and not plugin.is_applied and module is not None:
        norms = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
        local = {name: type(m).__qualname__ for name, m in norms if not isinstance(m, SyncNormBase)}
        if found := list_obstacles(local, "layer(s) are not synchronized"):
            raise RuntimeError(
                f"{type(strategy).__name__} does not apply layer plugins, such as "
                f"MultiBNLayerSync: {found} Call `plugin.apply(model)` or convert_sync_batchnorm "
                "in the module's `configure_model`."
            )
    _lightnings_on_train_start(strategy)


# Lightning calls no method of a plugin when training starts; every strategy has this method.
_lightnings_on_train_start = Strategy.on_train_start
Strategy.on_train_start = _on_train_start  # type: ignore[assignment, method-assign]


class PreciseBN(Callback):
    """Replaces running statistics by statistics of the training data with the current weights.

    Runs after the last batch of an epoch, before that epoch's validation and checkpoints. The
    batches come from `trainer.train_dataloader`, a single loader, on the trainer's device and in
    the trainer's precision. `limit_train_batches` does not limit them.
    Collective: every rank runs this callback at the same time.

    Parameters
    ----------
    num_samples, estimator, forward_fn
        As for `multibn.torch.update_bn_stats`; `num_samples` counts the samples of all ranks.
    every_n_epochs
        Number of epochs between runs; the callback also runs after epoch `max_epochs`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> from lightning.pytorch import Trainer
    >>> from multibn.torch.lightning import PreciseBN
    >>> callback = PreciseBN(num_samples=8192, every_n_epochs=5)
    >>> trainer = Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    >>> callback in trainer.callbacks
    True
    """

    def __init__(
        self,
        num_samples: int | None = None,
        every_n_epochs: int = 1,
        *,
        estimator: precise_bn.Estimator = "population",
        forward_fn: Callable[[Any, Any], object] | None = None,
    ) -> None:
        precise_bn.check_arguments(num_samples, None, estimator)
        check_int("every_n_epochs", every_n_epochs)
        self.every_n_epochs = every_n_epochs
        self.options: Any = {"num_samples": num_samples, "estimator": estimator}
        self.options |= {"forward_fn": forward_fn, "progress": False}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not on_train_epoch_end, which comes after the epoch's validation.
        epoch = trainer.current_epoch + 1
        is_due = epoch % self.every_n_epochs == 0 or epoch == trainer.max_epochs
        if trainer.is_last_batch and is_due:
            self.update(trainer, pl_module)

    def update(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run precise batch norm now. Collective."""

        def batches() -> Any:
            for batch in second_reader(trainer.train_dataloader):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = pl_module._on_before_batch_transfer(batch)  # or the data module's
                yield trainer.strategy.batch_to_device(batch)

        with trainer.precision_plugin.train_step_context():
            precise_bn.update_bn_stats(pl_module, batches(), **self.options)
