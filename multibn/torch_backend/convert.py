"""Exchange the batch norm layers of a model for synchronized ones, and back."""

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from multibn._typing import RunningVar, Weighting
from multibn.torch_backend import _data_parallel
from multibn.torch_backend.modules import SyncBatchNorm, Synchronized
from multibn.torch_backend.sub_batch_norm import _SubBatchNorm

_M = TypeVar("_M", bound=nn.Module)

# A class that defines only these names behaves like the batch norm that it derives from.
_HARMLESS = {
    "__annotations__",
    "__constants__",
    "__doc__",
    "__firstlineno__",
    "__init__",
    "__module__",
    "__static_attributes__",
    "_check_input_dim",
    "extra_repr",
}


class BatchNorm(_BatchNorm):
    """Batch normalization of this process alone, for any number of dimensions from 2.

    `revert_sync_batchnorm` returns one for a `SyncBatchNorm` that was never converted.
    """

    def _check_input_dim(self, input: Any) -> None:
        if input.ndim < 2:
            raise ValueError(
                f"the input must have 2 or more dimensions: got shape {tuple(input.shape)}."
            )


def convert_sync_batchnorm(
    module: nn.Module,
    process_group: Any = None,
    *,
    weighting: Weighting = "element",
    running_var: RunningVar = "unbiased_global",
) -> Any:
    """Replace every nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm of a model by `SyncBatchNorm`.

    Returns `module`, or the new layer if `module` is a batch norm itself. Call it before or after
    the construction of the optimizer and DistributedDataParallel (DDP): parameters and buffers stay
    the same objects. So do all other attributes, hooks among them, and a layer used in several
    places stays one layer. From the first training forward pass on, at the latest, DDP leaves
    running statistics that are equal on all ranks out of its broadcast of buffers. Layers in plain
    lists and dictionaries stay unchanged. Not collective.

    Parameters
    ----------
    module
        The model, changed in place.
    process_group
        The ranks that share statistics: anything that `multibn.as_communicator` takes. With None,
        an nn.SyncBatchNorm keeps its own group.
    weighting, running_var
        As `SyncBatchNorm`'s.

    Raises
    ------
    TypeError, ValueError
        As `SyncBatchNorm`.

    Warns
    -----
    UserWarning
        For a layer that stays as it is: its class overrides more than the constructor, or the layer
        is parametrized, or lazy and without an input so far.
    """
    SyncBatchNorm(1, process_group=process_group, weighting=weighting, running_var=running_var)

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, SyncBatchNorm) or not isinstance(layer, _BatchNorm):
            return layer
        if _obstructed(layer, _BatchNorm.__module__, "its statistics stay local"):
            return layer
        group = process_group
        if group is None and isinstance(layer, nn.SyncBatchNorm):
            group = layer.process_group
        new = _with_class(layer, SyncBatchNorm)
        new.__dict__.pop("process_group", None)  # nn.SyncBatchNorm's, a property here
        new.configure(group, weighting=weighting, running_var=running_var)
        new.converted_from = type(layer)
        return new

    converted = _replace(module, convert)
    for part in converted.modules():
        if isinstance(part, DistributedDataParallel):
            _data_parallel.watch(part, Synchronized)
    return converted


def revert_sync_batchnorm(module: nn.Module) -> Any:
    """Replace every `SyncBatchNorm` by a layer of the class that it was converted from.

    For export or single-process use. Changes `module` in place and returns the same as
    `convert_sync_batchnorm`. A layer that was built as a `SyncBatchNorm` becomes a `BatchNorm`, a
    `NaiveSyncBatchNorm2d` an nn.BatchNorm2d. An nn.SyncBatchNorm gets its process group back, if
    this process knows the group. Not collective.

    Warns
    -----
    UserWarning
        For a layer that stays as it is, for the reasons of `convert_sync_batchnorm` or because it
        ends in a ReLU.
    """

    def revert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        if _obstructed(layer, __package__, "it stays synchronized"):
            return layer
        original = layer.converted_from or BatchNorm
        new = _with_class(layer, original)
        communicator = new.__dict__.pop("conversation").wrapped
        for name in ("weighting", "running_var_convention", "fuse_relu", "converted_from"):
            new.__dict__.pop(name, None)
        if issubclass(original, nn.SyncBatchNorm):
            new.__dict__["process_group"] = getattr(communicator, "known_group", None)
        return new

    return _replace(module, revert)


def _obstructed(layer: nn.Module, home: str, consequence: str) -> bool:
    """Warn and return True if `layer` does more than its first base class in the module `home`."""
    cls = type(layer)
    derived = itertools.takewhile(lambda base: not base.__module__.startswith(home), cls.__mro__)
    overridden = sorted({name for base in derived for name in vars(base)} - _HARMLESS)
    if hasattr(layer, "parametrizations"):
        why = "it is parametrized. Remove the parametrizations, convert, and register them again."
    elif isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        why = "it has not seen an input yet. Run the model once, then convert."
    elif overridden:
        why = f"its class overrides {', '.join(overridden)}, which would be lost."
    elif getattr(layer, "fuse_relu", False):
        why = "it has a ReLU inside, which would be lost."
    elif "forward" in vars(layer):
        why = "it has a forward pass of its own, which would be lost."
    else:
        return False
    name = f"{cls.__module__}.{cls.__qualname__}"
    warnings.warn(f"{name} is left as it is, {consequence}: {why}", stacklevel=4)
    return True


def _with_class(layer: nn.Module, cls: type[_M]) -> _M:
    """A module of `cls` with the same attributes as `layer`."""
    new = cls.__new__(cls)
    # The same dictionaries of parameters, buffers and hooks: a handle can still remove its hook,
    # and references to the old layer stay in use.
    new.__dict__.update(layer.__dict__)
    hook: Any
    for hook in new._load_state_dict_pre_hooks.values():
        if hook.with_module:  # torch has a weak reference to the old layer here
            hook.module = weakref.ref(new)
    return new


def _replace(module: nn.Module, exchange: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Apply `exchange` once to `module` and once to each module below it."""
    done: dict[int, nn.Module] = {}

    def visit(old: nn.Module) -> nn.Module:
        if id(old) not in done:
            done[id(old)] = new = exchange(old)
            for name, child in list(new._modules.items()):
                # A SubBatchNorm, with its parts, keeps the ranks that its constructor got.
                if child is not None and not isinstance(new, _SubBatchNorm):
                    new._modules[name] = visit(child)
        return done[id(old)]

    return visit(module)
