"""The classes of converted layers: synchronized subclasses of the original classes.

Code around a model finds layers by class: optimizers that do not decay norms, freezing, precise
statistics, initialization. A converted layer must therefore stay an instance of its class. A class
that overrides `forward`, such as timm's BatchNormAct2d, keeps its `forward`. In that `forward`, a
TorchFunctionMode replaces torch.nn.functional.batch_norm, which takes about 0.1 ms per call.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn, serialization
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from multibn.engine.plan import NormArgs
from multibn.torch_backend.layer import dtensors, functional, modules, validation
from multibn.torch_backend.layer.autograd import running_stats_of
from multibn.torch_backend.layer.base import communicator_of, updates_running
from multibn.torch_backend.layer.modules import SyncBatchNorm, call_node

_TORCH_TO_SYNC: dict[type[_BatchNorm], type[SyncBatchNorm]] = {
    getattr(nn, f"BatchNorm{n}d"): getattr(modules, f"SyncBatchNorm{n}d") for n in (1, 2, 3)
}
#: The synchronized class for each class that has been converted.
CLASSES: dict[type[_BatchNorm], type[SyncBatchNorm]] = dict(_TORCH_TO_SYNC)

# The attributes of a synchronized layer that its original lacks.
_ATTRIBUTES = vars(SyncBatchNorm(1)).keys() - vars(nn.BatchNorm1d(1)).keys()
_ATTRIBUTES |= {"converted_from", "original_process_group", "_has_called_batch_norm", "_num_splits"}


def swap_class(layer: Any, /) -> SyncBatchNorm:
    """Set the class of `layer` to its synchronized subclass; the caller must configure it."""
    original = type(layer)
    if isinstance(layer, SyncBatchNorm):  # from `convert_sub_batchnorm`
        del layer._num_splits
    elif isinstance(layer, nn.SyncBatchNorm):  # DistributedDataParallel rejects this class on CPU
        group = communicator_of(layer.__dict__.pop("process_group"))  # the new class has a property
        layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
        layer.__dict__.update(original_process_group=group, converted_from=original)
    else:
        layer.__class__ = _sync_class(original)
    return layer


def restore(layer: nn.Module, original: type[nn.Module], /) -> None:
    """Change the class of `layer` to `original`, and remove the attributes of `SyncBatchNorm`."""
    group = getattr(layer, "original_process_group", None)
    for name in _ATTRIBUTES:
        layer.__dict__.pop(name, None)
    layer.__class__ = original
    if issubclass(original, nn.SyncBatchNorm):
        layer.__dict__["process_group"] = getattr(group, "existing_group", None)


def _sync_class(original: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """Return the synchronized subclass of `original`; create it on first use."""
    if original not in CLASSES:
        attributes: dict[str, Any] = {"__module__": __name__, "converted_from": original}
        check = original._check_input_dim
        with_check = [
            sync for plain, sync in _TORCH_TO_SYNC.items() if plain._check_input_dim is check
        ]
        base = _Derived if original.forward is _BatchNorm.forward else _OwnForward
        bases: Any = (base, *with_check, original)
        CLASSES[original] = type(f"Sync{original.__name__}", bases, attributes)
    return CLASSES[original]


def _new(original: type[_BatchNorm]) -> SyncBatchNorm:
    """Return a layer without attributes, for copies and pickles."""
    derived = _sync_class(original)
    safe: list[Any] = serialization.get_safe_globals()
    if original in safe:  # `derived` cannot be imported by name, so users cannot allow it
        name = f"{__name__}.{original.__module__}.{original.__qualname__}"
        serialization.add_safe_globals([(derived, name)])
    layer: SyncBatchNorm = object.__new__(derived)
    return layer


class _Derived(SyncBatchNorm):
    """Base of classes created at run time; copies and pickles refer to the original class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self.converted_from,), self.__getstate__()


# If the fields of NormArgs after `axis` are these, evaluation runs the original `forward`.
_FIELD_DEFAULTS = tuple(NormArgs._field_defaults.values())


class _OwnForward(_Derived):
    """Base of classes whose original overrides `forward` and calls F.batch_norm in it."""

    converted_from: type[_BatchNorm]
    _has_called_batch_norm = False  # whether any forward pass has called F.batch_norm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        if any(isinstance(argument, fx.Proxy) for argument in arguments):
            return call_node(self, *args, **kwargs)
        has_dtensor = dtensors.contains_dtensor((*arguments, self.weight))
        x: Any = next((a for a in arguments if isinstance(a, Tensor)), None)
        if not (self.training or has_dtensor) and self._as_input(x)[5:] == _FIELD_DEFAULTS:
            return self.converted_from.forward(self, *args, **kwargs)
        mode = _SyncBatchNormMode(self)
        try:
            with mode:
                y = self.converted_from.forward(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            if self.training and not mode.batch_norm_called:  # otherwise other ranks would hang
                validation.raise_on_all_ranks(error, x, self.num_features, self.layer_communicator)
            raise
        if not mode.batch_norm_called:
            self._check_may_skip_batch_norm(x)
        elif not (self._has_called_batch_norm or torch.compiler.is_compiling()):
            self._has_called_batch_norm = True
        return y

    def _check_may_skip_batch_norm(self, x: Tensor | None) -> None:
        """Raise RuntimeError if other ranks would hang because this pass called no F.batch_norm.

        A layer that has called F.batch_norm before may return an empty batch unchanged, or, in a
        single process, normalize by other code.
        """
        is_alone_or_empty = self.layer_communicator.size == 1 or (x is not None and not len(x))
        if self.training and not (self._has_called_batch_norm and is_alone_or_empty):
            raise RuntimeError(
                f"`{self.layer_communicator.name}`, a {self.converted_from.__qualname__}, cannot "
                "share statistics: its forward pass in training did not call "
                "torch.nn.functional.batch_norm with the layer's running_mean. Call "
                "revert_sync_batchnorm, then convert the parts of the model without this layer."
            )


# A layer that uses one of these names for an attribute of its own cannot be converted.
_ADDED = {*dir(SyncBatchNorm(1)), *dir(_OwnForward)} - {*dir(nn.SyncBatchNorm(1))}
RESERVED_ATTRIBUTES = sorted(name for name in _ADDED if not name.startswith("__"))


class _SyncBatchNormMode(functional.BatchNormMode):
    """Synchronize the calls of F.batch_norm that pass the layer's running_mean."""

    def __init__(self, layer: _OwnForward) -> None:
        super().__init__()
        self.layer = layer
        counter = layer.num_batches_tracked
        self.count_before = None if counter is None else counter.clone()
        self.batch_norm_called = False

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Replace torch.nn.functional.batch_norm."""
        layer = self.layer
        eps, momentum = validation.as_number(eps), validation.as_number(momentum)
        args = layer._as_input(input)._replace(weight=weight, bias=bias, eps=eps)
        is_own = running_mean is (layer.running_mean if layer.track_running_stats else None)
        self.batch_norm_called |= is_own
        if is_own and not training and running_mean is not None and running_var is not None:
            return functional.normalize_with_running_stats(args, running_mean, running_var)
        if not (is_own and training):
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        # Not `num_features`: lightly's SplitBatchNorm views its splits as channels.
        lengths = [len(p) for p in (running_mean, weight, bias) if p is not None]
        num_channels = [*lengths, layer.num_features][0]
        before, counter = self.count_before, layer.num_batches_tracked
        if layer._num_splits > 1:
            if before is not None and counter is not None:  # `step_statistics` will increment it
                counter.copy_(before)
            return layer.forward_splits(args, num_channels, momentum)
        running = running_stats_of(layer, layer.running_var_convention, momentum)
        args, group = args._replace(running=running), layer.layer_communicator
        y, batch = functional.normalize_with_batch_stats(
            args, num_channels, group, weighting=layer.weighting
        )
        if running is not None and before is not None and counter is not None:
            # The original `forward` has incremented the counter. Undo this for recomputations and
            # for batches that are empty on all ranks.
            is_counted = (batch.count > 0) & updates_running(running, input)
            counter.copy_(torch.where(is_counted, counter, before))
        return y
