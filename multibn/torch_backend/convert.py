"""Exchange the batch norm layers of a model for synchronized ones, and back."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn._typing import RunningVar, Weighting
from multibn.torch_backend.modules import SyncBatchNorm

_M = TypeVar("_M", bound=nn.Module)

# The forward passes that SyncBatchNorm stands for.
_KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


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
    buffers stay the same objects. Dtype, device, training mode, requires_grad, hooks, qconfig and
    every other attribute stay too, and a layer used in several places stays one layer. Converting
    again changes nothing. Not collective.

    Parameters
    ----------
    module
        The model, changed in place; or a batch norm layer, which is not.
    process_group
        Who shares statistics: anything that `multibn.as_communicator` takes. A converted
        nn.SyncBatchNorm keeps its own group where None is given.
    weighting, running_var
        As `SyncBatchNorm`'s.

    Returns
    -------
    torch.nn.Module
        `module`, or the new layer if it is a batch norm itself.

    Warns
    -----
    UserWarning
        For a batch norm class with a forward pass of its own, a parametrized layer, or a lazy one
        that has seen no input: it is left as it is.
    """

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, SyncBatchNorm) or not isinstance(layer, _BatchNorm):
            return layer
        obstacle = _obstacle(layer)
        if obstacle:
            warnings.warn(
                f"{type(layer).__module__}.{type(layer).__qualname__} is left as it is, its "
                f"statistics stay local: {obstacle}",
                stacklevel=2,
            )
            return layer
        group = process_group
        if group is None and isinstance(layer, nn.SyncBatchNorm):
            group = layer.process_group
        new = _with_class(layer, SyncBatchNorm)
        new.__dict__.pop("process_group", None)  # nn.SyncBatchNorm's, a property here
        new.configure(group, weighting=weighting, running_var=running_var)
        new.converted_from = type(layer)
        return new

    return _replace(module, convert)


def revert_sync_batchnorm(module: nn.Module) -> Any:
    """Replace every `SyncBatchNorm` by a layer of the class that it was converted from.

    For export or single-process use. Keeps what `convert_sync_batchnorm` keeps. A layer that was
    built as a `SyncBatchNorm` becomes a `BatchNorm` for any number of dimensions. Not collective.

    Returns
    -------
    torch.nn.Module
        `module`, changed in place, or the new layer if it is a `SyncBatchNorm` itself.
    """

    def revert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        original = layer.converted_from or BatchNorm
        new = _with_class(layer, original)
        communicator = new.__dict__.pop("_communicator")
        for name in ("weighting", "running_var_convention", "converted_from"):
            new.__dict__.pop(name, None)
        if issubclass(original, nn.SyncBatchNorm):
            new.__dict__["process_group"] = getattr(communicator, "group", None)
        return new

    return _replace(module, revert)


def _obstacle(layer: _BatchNorm) -> str | None:
    cls = type(layer)
    if hasattr(layer, "parametrizations"):
        return "it is parametrized. Remove the parametrizations, convert, and register them again."
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "it has not seen an input yet. Run the model once, then convert."
    if cls.forward not in _KNOWN_FORWARDS:
        return "the class has a forward pass of its own, which conversion would drop."
    return None


def _with_class(layer: nn.Module, cls: type[_M]) -> _M:
    """A module of `cls` with everything that `layer` has, as the same objects."""
    new = cls.__new__(cls)
    # The very dictionaries of parameters, buffers and hooks: handles that remove a hook, and
    # whoever holds on to the old layer, go on working.
    new.__dict__.update(layer.__dict__)
    return new


def _replace(module: nn.Module, exchange: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Apply `exchange` to `module` and all modules below, once to each."""
    done: dict[int, nn.Module] = {}

    def visit(old: nn.Module) -> nn.Module:
        if id(old) not in done:
            done[id(old)] = new = exchange(old)
            for name, child in list(new._modules.items()):
                if child is not None:
                    new._modules[name] = visit(child)
        return done[id(old)]

    return visit(module)
