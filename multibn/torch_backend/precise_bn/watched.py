"""Batch norms of a model in training mode: what a pass shows them, and what is kept of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.statistics import local_moments
from multibn.torch_backend.modules import Synchronized
from multibn.torch_backend.precise_bn.estimators import (
    Estimate,
    Estimator,
    MeanOfVar,
    Population,
)


class WatchedNorm:
    """A batch norm in training mode: what it is shown, and where its running statistics are.

    `keepers` are the modules with the running statistics: the layer itself, or the two parts of a
    sub-batch norm, or none.
    """

    def __init__(
        self, name: str, module: nn.Module, keepers: Sequence[_BatchNorm], estimator: Estimator
    ) -> None:
        self.name = name or type(module).__name__
        self.module = module
        self.num_features = keepers[0].num_features
        # Without running statistics it is watched all the same: it may communicate in training.
        self.keepers = [keeper for keeper in keepers if keeper.running_mean is not None]
        like = next((k.running_mean for k in self.keepers), None)
        like = torch.zeros(self.num_features) if like is None else like
        self.estimator: Population | MeanOfVar = (
            Population(like) if estimator == "population" else MeanOfVar(like, self.communicator)
        )

    @property
    def communicator(self) -> Communicator:
        """Who shares the layer's batch statistics, as the layer itself asks them."""
        if isinstance(self.module, Synchronized):
            return self.module._communicator
        if isinstance(self.module, nn.SyncBatchNorm):
            return as_communicator(self.module.process_group)
        return SingleProcess()

    @contextmanager
    def watched(self, visits: list[Callable[[], object]]) -> Iterator[None]:
        """Note the moments of each input, and in `visits` a call on an empty batch shaped alike."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Any = next(iter((*args, *kwargs.values())), None)
            if not self._fits(x):
                return  # the layer will say so, and tell the other ranks
            visits.append(partial(module, x.new_empty((0, *x.shape[1:]))))
            if self.keepers:
                with torch.autocast(x.device.type, enabled=False):
                    self.estimator.update(local_moments(x.detach()))

        handle = self.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _fits(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.ndim > 1
            and x.shape[1] == self.num_features
        )

    def write(self, new: Estimate) -> None:
        """Keep `new`; each split of a sub-batch norm is given the whole batch's statistics."""
        for keeper in self.keepers:
            num_splits = keeper.num_features // self.num_features
            for running, value in ((keeper.running_mean, new.mean), (keeper.running_var, new.var)):
                assert running is not None
                running.copy_(value.repeat(num_splits))


def layers_in_training(model: nn.Module, estimator: Estimator) -> Iterator[WatchedNorm]:
    parts: set[Any] = set()
    module: Any
    for name, module in model.named_modules():
        if _is_sub_batch_norm(module):
            keepers = [module.bn, module.split_bn]
            parts.update(keepers)
            # `split_bn` is what loops that freeze batch norms find.
            if module.training and module.split_bn.training:
                yield WatchedNorm(name, module, keepers, estimator)
        elif isinstance(module, _BatchNorm) and module.training and module not in parts:
            yield WatchedNorm(name, module, [module], estimator)


def _is_sub_batch_norm(module: Any) -> bool:
    """Also SlowFast's own: known by its parts, of which only one sees data in training."""
    return (
        isinstance(getattr(module, "bn", None), _BatchNorm)
        and isinstance(getattr(module, "split_bn", None), _BatchNorm)
        and hasattr(module, "aggregate_stats")
    )
