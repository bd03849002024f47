"""Convert the batch norm layers of a model to synchronized layers, and back."""

from itertools import chain
from typing import Any, NoReturn, TypeVar

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from multibn._typing import check_bool, check_int, list_obstacles, overridden
from multibn._warnings import warn, warn_or_raise
from multibn.communicators import CommunicatorLike, as_communicator
from multibn.engine.plan import NormArgs
from multibn.engine.running import is_running_statistic
from multibn.options import differing
from multibn.torch_backend.convert import class_swap
from multibn.torch_backend.layer import data_parallel, functional, validation
from multibn.torch_backend.layer.autograd import running_stats_of
from multibn.torch_backend.layer.base import (
    LOCAL,
    LayerOptions,
    SharingOptions,
    SyncNormBase,
    check_module,
    sharing_options,
    takes_sharing_options,
)
from multibn.torch_backend.layer.modules import SyncBatchNorm, call_node, without_none
from multibn.torch_backend.layer.sub_batch_norm import SubBatchNormPart
from multibn.torch_backend.norms.batch_renorm import SyncBatchRenormBase
from multibn.torch_backend.norms.group_norm import SyncGroupsBase

_Model = TypeVar("_Model", bound=nn.Module)
# Names that a subclass may define without changing what the layer computes.
_HARMLESS = "__constants__", "_check_input_dim", "extra_repr"
# Options that torch's layers have, or that reverting is meant to drop. Any other would be lost.
_REVERTIBLE_OPTIONS = (
    "eps= momentum= affine= bias= track_running_stats= weighting= running_var= nonfinite= "
    "num_splits="
)


class BatchNorm(_BatchNorm):
    """Local (unsynchronized) batch norm for inputs with two or more dimensions.

    `revert_sync_batchnorm` converts a `SyncBatchNorm` to this class if it was constructed directly.
    Calls accept `mask` or `lengths`, like calls of `SyncBatchNorm`.

    Examples
    --------
    >>> from multibn.torch import SyncBatchNorm, revert_sync_batchnorm
    >>> layer = revert_sync_batchnorm(SyncBatchNorm(4, momentum=0.01))
    >>> type(layer).__name__, layer.momentum
    ('BatchNorm', 0.01)
    """

    def forward(
        self, input: Tensor, *, mask: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input, **without_none(mask=mask, lengths=lengths))
        if mask is lengths is None:
            return super().forward(input)
        C = self.num_features
        mask = validation.mask_of(input, mask, lengths, C, LOCAL)
        axis = validation.non_channel_axes(input)
        running = running_stats_of(self, "unbiased_global") if self.training else None
        args = NormArgs(input, self.weight, self.bias, self.eps, axis, mask=mask, running=running)
        if self.training or self.running_mean is None:
            return functional.normalize_with_batch_stats(args, C, LOCAL, weighting="element")[0]
        return functional.normalize_with_running_stats(args, self.running_mean, self.running_var)

    _check_input_dim = nn.SyncBatchNorm._check_input_dim


class_swap.CLASSES[BatchNorm] = SyncBatchNorm  # its counterpart, which also takes masks


@takes_sharing_options
def convert_sync_batchnorm(
    module: _Model,
    process_group: CommunicatorLike = None,
    *,
    strict: bool = False,
    **options: Unpack[SharingOptions],
) -> _Model:
    """Convert every batch norm layer of a model, including subclasses of torch's.

    Changes the layers in place and returns `module`. A converted layer is a `SyncBatchNorm`, and
    stays an instance of its class: an nn.BatchNorm2d becomes a `SyncBatchNorm2d`. The exception is
    nn.SyncBatchNorm, a class that DistributedDataParallel (DDP) rejects on CPU. A layer that
    overrides `forward` keeps its `forward`; in training its call of torch.nn.functional.batch_norm
    is synchronized. All attributes stay, including parameters, buffers and hooks. Call this
    function before or after the construction of the optimizer, DDP and FSDP. DDP no longer
    broadcasts running statistics that are equal on all ranks, at the latest from the first training
    forward pass on. Layers in plain lists and dictionaries are not found. Layers that are already
    synchronized are unchanged; layers from `convert_sub_batchnorm` lose their splits. Not
    collective.

    Parameters
    ----------
    module
        The model, changed in place.
    process_group
        The ranks that share statistics: anything that `multibn.as_communicator` takes. With None,
        an nn.SyncBatchNorm keeps its own group.
    weighting, running_var, nonfinite
        As for `SyncBatchNorm`.
    strict
        Raise, without changing anything, if a layer cannot be converted or the model has no batch
        norm.

    Raises
    ------
    TypeError, ValueError
        As `SyncBatchNorm`. TypeError if `module` is no module. With `strict`, TypeError if a layer
        cannot be converted or the model has no batch norm.
    RuntimeError
        In a training forward pass of a layer whose `forward` does not call
        torch.nn.functional.batch_norm with the layer's running mean.

    Warns
    -----
    UserWarning
        One warning that lists the layers that were not converted, grouped by reason. One if the
        model has no batch norm. One for layers that are already synchronized with different
        options. `process_group` is compared only if there is no layer to convert.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch import convert_sync_batchnorm
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> model = convert_sync_batchnorm(model)
    >>> type(model[1]).__name__, isinstance(model[1], nn.BatchNorm2d)
    ('SyncBatchNorm2d', True)
    """
    options = sharing_options(options)
    SyncBatchNorm(1, process_group=process_group, **options)
    layers = _find_layers(module, strict)
    mismatches = _options_mismatch(module, layers, process_group, options)
    consequence = "layer(s) already synchronized with different options were left unchanged"
    warn(list_obstacles(mismatches, consequence))
    for layer in map(class_swap.swap_class, layers):
        group = layer.original_process_group if process_group is None else process_group
        layer.configure(group, **options)
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            data_parallel.patch_ddp(part)
    return module


def _options_mismatch(
    module: nn.Module, layers: list[_BatchNorm], process_group: Any, options: SharingOptions
) -> dict[str, str]:
    """Return the options of already synchronized layers that differ from `options`, by path."""
    requested = {name: v for name, v in options.items() if v != getattr(LayerOptions, name)}
    if not layers and process_group is not None:  # otherwise it is for the converted layers
        requested["process_group"] = as_communicator(process_group)
    mismatches: dict[str, str] = {}
    for path, part in module.named_modules():
        if isinstance(part, SyncBatchNorm) and part not in layers:
            group = part.layer_communicator.communicator
            actual = vars(part.norm_options) | {"process_group": group}
            if text := differing(actual, requested):
                mismatches[path] = f"{text}. Call revert_sync_batchnorm first"
    return mismatches


def convert_sub_batchnorm(
    module: _Model, num_splits: int, *, strict: bool = False, **others: NoReturn
) -> _Model:
    """Make every batch norm normalize each sub-batch with its own statistics (ghost batch norm).

    Ghost batch normalization (Hoffer et al., 2017, arXiv:1705.08741) for an existing model: a large
    batch trains like several small ones. Changes the layers in place, as `convert_sync_batchnorm`
    does, including layers that are already synchronized or split, and returns `module`;
    `revert_sync_batchnorm` undoes it. The parts are consecutive samples, of sizes that differ by
    one at most. The running statistics are those of the whole batch, as in an nn.BatchNorm2d, so
    that evaluation and state dicts are unchanged. Neither this call nor the layers are collective.
    For parts whose statistics ranks share, and for SlowFast's state dict, see `SubBatchNorm3d`.

    Parameters
    ----------
    module, strict
        As for `convert_sync_batchnorm`.
    num_splits
        Number of sub-batches. Small batches have fewer, so that each has at least one sample and
        two values per channel, including masked values. In training, a mask that excludes a whole
        sub-batch raises ValueError.

    Raises
    ------
    TypeError, ValueError
        If `num_splits` is no positive int; TypeError for any other option; and as
        `convert_sync_batchnorm`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import convert_sub_batchnorm
    >>> layer = convert_sub_batchnorm(torch.nn.BatchNorm1d(1, affine=False), 2)
    >>> layer(torch.tensor([[1.0], [2.0], [3.0], [30.0], [40.0]])).flatten()
    tensor([-1.2247,  0.0000,  1.2247, -1.0000,  1.0000])
    """
    if others:
        raise TypeError(
            "convert_sub_batchnorm() takes `num_splits` and `strict`: got "
            f"{', '.join(f'`{name}`' for name in others)}. For a virtual batch size, pass "
            "num_splits=batch_size // virtual_batch_size."
        )
    check_int("num_splits", num_splits)
    for layer in _find_layers(module, strict, splitting=True):
        if not isinstance(layer, SyncBatchNorm):
            class_swap.swap_class(layer).configure(LOCAL)
        layer.process_group, layer._num_splits = LOCAL, num_splits
    return module


def _find_layers(module: nn.Module, strict: bool, *, splitting: bool = False) -> list[Any]:
    """Return the layers to convert. Warn about all others with running statistics, or raise."""
    check_module("module", module)
    check_bool(strict=strict)
    layers: list[Any] = []
    obstacles: dict[str, str] = {}
    for path, part in module.named_modules():
        has_splits = isinstance(part, SyncBatchNorm) and "_num_splits" in vars(part)
        is_convertible = has_splits or (splitting and isinstance(part, SyncBatchNorm))
        if isinstance(part, SyncNormBase | SubBatchNormPart) and not is_convertible:
            continue
        if why := _cannot_convert(part):
            obstacles[path] = f"{_class_name(part)}: {why}"
        elif isinstance(part, _BatchNorm):
            check_int("num_features", part.num_features)
            LayerOptions.of(part).check()
            layers.append(part)
    consequence = "layer(s) cannot be converted; their statistics will not be synchronized"
    message = list_obstacles(obstacles, consequence)
    has_norms = layers or obstacles or any(isinstance(m, SyncNormBase) for m in module.modules())
    if not has_norms:
        message = (
            f"`module` has no batch norm layer of torch: got {_class_name(module)}. Nothing is "
            "synchronized. Frozen norms (as in torchvision's detectors), group norms and layer "
            "norms need no synchronization."
        )
    warn_or_raise(message, strict)
    return layers


def revert_sync_batchnorm(module: _Model) -> _Model:
    """Convert synchronized batch, group and instance norms back to their original classes.

    For export or single-process use. Layers from `convert_sub_batchnorm` are reverted, too. Changes
    the layers in place and returns `module`. A layer that was constructed as a `SyncBatchNorm`
    becomes a `BatchNorm`, a `NaiveSyncBatchNorm2d` an nn.BatchNorm2d. An nn.SyncBatchNorm gets its
    process group back, if the group exists in this process. Not collective.

    Warns
    -----
    UserWarning
        One warning that lists the layers that were not reverted: sub-batch norms such as
        `SubBatchNorm2d`, batch renorm layers, layers with a fused ReLU, parametrized layers, layers
        whose `forward` was replaced, and subclasses of multibn's layers that override methods.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch import convert_sync_batchnorm, revert_sync_batchnorm
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> model = revert_sync_batchnorm(convert_sync_batchnorm(model))
    >>> type(model[1]).__name__
    'BatchNorm2d'
    """
    check_module("module", module)
    obstacles: dict[str, str] = {}
    for path, part in module.named_modules():
        if not isinstance(part, SyncNormBase):
            continue
        if not isinstance(part, SyncBatchNorm | SyncGroupsBase):
            obstacles[path] = f"{_class_name(part)}: its splits keep separate running statistics"
        elif why := _cannot_revert(part):
            obstacles[path] = f"{_class_name(part)}: {why}"
        else:
            class_swap.restore(part, part.converted_from or BatchNorm)
    warn(list_obstacles(obstacles, "layer(s) could not be reverted and stay synchronized"))
    return module


_RENORMALIZES = "it renormalizes its batch, which would be lost"
_PARAMETRIZED = (
    "it is parametrized. Remove the parametrizations first and register them again afterwards"
)


def _cannot_convert(layer: nn.Module) -> str | None:
    """Return why `layer` cannot be converted; None if it can, or has no running statistics."""
    if not isinstance(layer, _BatchNorm):
        why = "it is not a subclass of torch's batch norm"
        return why if _has_running_statistics(layer) else None
    if "forward" in vars(layer):
        return "its `forward` was replaced on the instance. Convert the model before patching it"
    if isinstance(layer, SyncBatchRenormBase):
        return _RENORMALIZES
    if isinstance(layer, SyncBatchNorm):
        return None
    if hasattr(layer, "parametrizations"):
        return _PARAMETRIZED
    if own := [name for name in class_swap.RESERVED_ATTRIBUTES if hasattr(layer, name)]:
        return f"it has an attribute {own[0]!r}, a name that SyncBatchNorm uses. Rename it"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "it is a lazy module that is not initialized. Run the model once first"
    if isinstance(layer, nn.SyncBatchNorm) and type(layer).forward is not nn.SyncBatchNorm.forward:
        return (
            "it is a subclass of nn.SyncBatchNorm with its own `forward`. Convert the original "
            "model instead"
        )
    return None


def _has_running_statistics(layer: nn.Module) -> bool:
    """Return whether a layer of another library seems to update running statistics."""
    # If the weight is a buffer, the norm is frozen, as torchvision's FrozenBatchNorm2d.
    if isinstance(layer, _NormBase) or "weight" in layer._buffers:
        return False
    items = chain(layer._parameters.items(), layer._buffers.items(), vars(layer).items())
    buffers = {k: v for k, v in items if isinstance(v, Tensor) and not v.requires_grad}
    if "num_batches_tracked" in buffers or any(map(is_running_statistic, buffers)):
        return True
    vectors = [v.shape for v in buffers.values() if v.is_floating_point() and v.ndim == 1]
    is_norm = hasattr(layer, "momentum") and (hasattr(layer, "eps") or hasattr(layer, "epsilon"))
    has_pair = len(vectors) > len(set(vectors))  # two of one shape: a mean and a variance
    return bool(vectors and getattr(layer, "track_running_stats", is_norm and has_pair))


def _cannot_revert(layer: SyncNormBase) -> str | None:
    """Return why `layer` cannot be reverted, or None if it can."""
    names = overridden(type(layer), lambda c: c.__module__.startswith("multibn."), *_HARMLESS)
    if isinstance(layer, SyncBatchRenormBase):
        return _RENORMALIZES
    if hasattr(layer, "parametrizations"):
        return _PARAMETRIZED
    if names:
        return f"its class overrides {', '.join(names)}, which would be lost"
    if lost := layer.norm_options.repr_of_changes(_REVERTIBLE_OPTIONS):
        return f"it has{lost[1:]}, which would be lost"
    if "forward" in vars(layer):
        return "its `forward` was replaced on the instance, which would be lost"
    return None


def _class_name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
