"""Batch norms in training mode, and estimators of their running statistics."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators.conversation import during
from multibn.communicators.outcomes import skips
from multibn.engine.population import PopulationEstimator, running_variance
from multibn.engine.precise import Estimate, Pass, Population, input_of
from multibn.engine.statistics import aggregate, local_moments
from multibn.kernels import generic
from multibn.torch_backend.layer import functional
from multibn.torch_backend.layer.autograd import without_autocast
from multibn.torch_backend.layer.sub_batch_norm import _SubBatchNorm
from multibn.torch_backend.layer.synchronized import Synchronized
from multibn.torch_backend.train.uneven import map_tensors, tensors_in

Estimator: TypeAlias = Literal["population", "mean_of_var"]


class MeanOfVar(PopulationEstimator):
    """Means over batches: of their means and, in the place of mean squares, of their variances."""

    def __init__(self, like: Tensor, shared_by: Communicator, /) -> None:
        super().__init__(like)
        self._shared_by = shared_by

    def sums_of(self, x: Tensor, /, *, axis: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
        moments = local_moments(x, axis=axis, mask=mask)
        if skips(self._shared_by, x.dtype) and not moments.meansqr.sum().isfinite():
            moments = local_moments(x[:0], axis=axis)  # the layer's message will tell
        # In the phase "forward": on another rank this message may meet a layer's refusal.
        batch = aggregate(moments, during(self._shared_by, "forward", moments.mean.dtype))
        var = running_variance(batch, local_count=0)
        has_data = float(moments.count > 0)
        return generic.pack(batch.mean, var, has_data, has_data)

    def estimate(self, communicator: Communicator, /) -> Estimate:
        sums = communicator.allreduce(self._sums)
        mean, var = generic.split_sums(sums / sums[-1].clamp(min=1), self.shape)
        return mean, var, sums[-1] > 0


class WatchedNorm:
    """A batch norm in training mode, with an estimator of its running statistics.

    `norms` are the modules that may have running statistics: the layer itself, or the two parts of
    a sub-batch norm. `tracking` are those that do. A layer that has none is watched, too: in
    training it may communicate.
    """

    def __init__(
        self, name: str, module: nn.Module, norms: Sequence[_BatchNorm], estimator: Estimator
    ) -> None:
        self.name = name or type(module).__name__
        self.module = module
        self.communicator: Communicator = SingleProcess()
        if isinstance(module, Synchronized):
            self.communicator = module.conversation
        elif isinstance(module, nn.SyncBatchNorm):
            self.communicator = as_communicator(module.process_group)
        self.num_features = norms[0].num_features
        self.tracking: list[Any] = [norm for norm in norms if norm.running_mean is not None]
        self.estimator: Population | MeanOfVar | None = None
        if self.tracking:
            like = self.tracking[0].running_mean
            is_population = estimator == "population"
            self.estimator = (
                Population(like) if is_population else MeanOfVar(like, self.communicator)
            )

    def watched(self, run: Pass) -> RemovableHandle:
        """Note each call in `run`, and add the inputs of torch's own layers."""
        is_shared = self.communicator.size > 1
        is_own = isinstance(self.module, Synchronized)
        # An empty batch needs no mask; a forward pass of a class's own may need its arguments.
        dropped = () if hasattr(self.module, "own_forward") else ("mask", "lengths")

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(args, kwargs)
            if not is_own and self.estimator is not None:
                try:
                    functional.check_input(x, self.num_features)
                except (TypeError, ValueError):
                    return  # the layer will raise
                with without_autocast(x):
                    sums = self.estimator.sums_of(x.detach(), axis=functional.all_but_channels(x))
                    self.estimator.add(sums)
            if is_shared:
                options = {k: v for k, v in kwargs.items() if k not in dropped}
                run.repeat(_call_with_no_sample(module, x, args, options))

        return self.module.register_forward_pre_hook(note, with_kwargs=True)

    def write(self, mean: Tensor, var: Tensor, /) -> None:
        """Write running statistics; all splits of a sub-batch norm get the same ones."""
        for norm in self.tracking:
            norm.running_mean.view(-1, self.num_features).copy_(mean)
            norm.running_var.view(-1, self.num_features).copy_(var)


def _call_with_no_sample(
    module: nn.Module, x: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Callable[[], object]:
    """A call of `module` as one with the input `x` was, with no sample in any of its tensors."""
    size = next((t.shape[:1] for t in tensors_in(x)), None)

    def shorten(t: Tensor) -> Tensor:
        return t.new_empty((0, *t.shape[1:])) if t.shape[:1] == size else t

    args, options = map_tensors(shorten, (args, options))
    return partial(module, *args, **options)


def layers_in_training(model: nn.Module, estimator: Estimator) -> Iterator[WatchedNorm]:
    parts: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, _SubBatchNorm):
            norms = [module.bn, module.split_bn]
            parts.update(norms)
            if module.training and module.split_bn.training:  # see `SubBatchNorm3d.split_bn`
                yield WatchedNorm(name, module, norms, estimator)
        elif isinstance(module, _BatchNorm) and module.training and module not in parts:
            yield WatchedNorm(name, module, [module], estimator)
