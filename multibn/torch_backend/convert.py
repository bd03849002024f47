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

# What a class may define and still behave like the batch norm that it derives from.
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

    What `revert_sync_batchnorm` makes of a `SyncBatchNorm` that was built as one.
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

    Call it before the optimizer and DistributedDataParallel are built, or after: parameters and
    buffers stay the same objects. DistributedDataParallel then leaves the running statistics that
    all ranks have in common out of its broadcast of buffers, at once or after the first training
    forward pass. Dtype, device, training mode, requires_grad, hooks, qconfig and every other
    attribute stay too, and a layer used in several places stays one layer. Layers are found as
    children of modules, not in plain lists and dictionaries. Converting again changes nothing. Not
    collective.

    Parameters
    ----------
    module
        The model, changed in place; or a batch norm layer, whose parameters, buffers and hooks the
        new layer takes over.
    process_group
        Who shares statistics: anything that `multibn.as_communicator` takes. A converted
        nn.SyncBatchNorm keeps its own group where None is given.
    weighting, running_var
        As `SyncBatchNorm`'s.

    Returns
    -------
    torch.nn.Module
        `module`, or the new layer if it is a batch norm itself.

    Raises
    ------
    TypeError, ValueError
        As `SyncBatchNorm`, for the arguments that they share.

    Warns
    -----
    UserWarning
        For a batch norm whose class overrides more than its constructor (a forward pass of its own,
        for example), a parametrized layer, or a lazy one that has seen no input: it is left as it
        is.
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

    For export or single-process use. Keeps what `convert_sync_batchnorm` keeps. A layer that was
    built as a `SyncBatchNorm` becomes a `BatchNorm` for any number of dimensions, and one that was
    built as a `NaiveSyncBatchNorm2d` an nn.BatchNorm2d. A process group that is not known in this
    process (the model was saved elsewhere) is forgotten. Not collective.

    Returns
    -------
    torch.nn.Module
        `module`, changed in place, or the new layer if it is a `SyncBatchNorm` itself.

    Warns
    -----
    UserWarning
        For a `SyncBatchNorm` that `convert_sync_batchnorm` would not touch if it were torch's, or
        that has a ReLU inside: it is left as it is.
    """

    def revert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        if _obstructed(layer, __package__, "it stays synchronized"):
            return layer
        original = layer.converted_from or BatchNorm
        new = _with_class(layer, original)
        communicator = new.__dict__.pop("_communicator").wrapped
        for name in ("weighting", "running_var_convention", "fuse_relu", "converted_from"):
            new.__dict__.pop(name, None)
        if issubclass(original, nn.SyncBatchNorm):
            new.__dict__["process_group"] = getattr(communicator, "known_group", None)
        return new

    return _replace(module, revert)


def _obstructed(layer: nn.Module, home: str, consequence: str) -> bool:
    """Warn and return True if `layer` is more than its base class from the package `home`."""
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
    """A module of `cls` with everything that `layer` has, as the same objects."""
    new = cls.__new__(cls)
    # The very dictionaries of parameters, buffers and hooks: handles that remove a hook, and
    # whoever holds on to the old layer, go on working.
    new.__dict__.update(layer.__dict__)
    hook: Any
    for hook in new._load_state_dict_pre_hooks.values():
        if hook.with_module:  # torch keeps a weak reference to the module it was registered on
            hook.module = weakref.ref(new)
    return new


def _replace(module: nn.Module, exchange: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Apply `exchange` to `module` and all modules below, once to each."""
    done: dict[int, nn.Module] = {}

    def visit(old: nn.Module) -> nn.Module:
        if id(old) not in done:
            done[id(old)] = new = exchange(old)
            for name, child in list(new._modules.items()):
                # Who shares statistics in a SubBatchNorm was chosen when it was built.
                if child is not None and not isinstance(new, _SubBatchNorm):
                    new._modules[name] = visit(child)
        return done[id(old)]

    return visit(module)
