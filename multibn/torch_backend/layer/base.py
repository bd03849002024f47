"""SyncNormBase, the base class of the synchronized layers, and the options of layers."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from multibn._typing import Nonfinite, RunningVar, Weighting, check_choice, check_int, check_number
from multibn.communicators import (
    Communicator,
    CommunicatorLike,
    DefaultCommunicator,
    SingleProcess,
    as_communicator,
)
from multibn.communicators.diagnostics import find_module_path
from multibn.communicators.layer_communicator import Compared, LayerCommunicator
from multibn.engine import recompute
from multibn.engine.plan import NormArgs
from multibn.engine.running import StepAccumulator
from multibn.kernels import Running
from multibn.options import NormOptions
from multibn.torch_backend.layer import compiled, dtensors
from multibn.torch_backend.layer.autograd import running_stats_of
from multibn.torch_backend.layer.validation import as_number

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NUMBERS = "eps", "momentum"  # the options that torch also takes as tensors of shape ()

#: This process alone. Compiled code can refer to it; ghost norms use it by default.
LOCAL = SingleProcess()
compiled.register(LOCAL)


def check_module(name: str, module: object, advice: str = "Pass the model.") -> None:
    """Raise TypeError, which names the argument `name`, unless `module` is an nn.Module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`{name}` must be a torch.nn.Module: got {type(module).__qualname__}. {advice}"
        )


def communicator_of(obj: CommunicatorLike) -> Communicator:
    """Return `as_communicator(obj)`, marked so that `SyncNormBase.process_group` returns `obj`."""
    communicator: Any = as_communicator(obj)
    if communicator is not obj and hasattr(communicator, "native"):
        communicator.is_of_native = True
    return cast(Communicator, communicator)


def running_tensors(norm: nn.Module) -> list[Tensor]:
    """Return a norm's running statistics and its counter, even if they are not buffers."""
    names = "running_mean", "running_var", "num_batches_tracked"
    return [t for name in names if isinstance(t := getattr(norm, name, None), Tensor)]


@contextmanager
def replaced(places: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set `values[name] = value` for each (values, name, value); restore the old values at exit."""
    before = [(values, name, values[name]) for values, name, _ in places]
    try:
        for values, name, value in places:
            values[name] = value
        yield
    finally:
        for values, name, value in before:
            values[name] = value


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks are registered on `module`.

    Global hooks are left out: `checkpoint_contexts` registers one for the recomputation only.
    """
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


@dataclass(frozen=True, kw_only=True)
class LayerOptions(NormOptions):
    """Options of a torch layer; a subclass of the layer may extend this class."""

    momentum: float | None = 0.1
    affine: bool = True
    bias: bool = True
    track_running_stats: bool = True
    running_var: RunningVar = "unbiased_global"
    num_splits: int = 1

    attributes = MappingProxyType(
        {"bias": "bias", "running_var": "running_var_convention", "num_splits": "_num_splits"}
    )

    def __post_init__(self) -> None:
        for name in _NUMBERS:  # of a layer that is to be converted
            object.__setattr__(self, name, as_number(getattr(self, name)))

    def check(self) -> None:
        super().check()
        check_number("momentum", self.momentum, "[0, 1]", none="the cumulative average")
        check_choice("running_var", self.running_var, RunningVar)
        check_int("num_splits", self.num_splits)


class SharingOptions(TypedDict, total=False):
    """Options that constructors and converters have in common, see `LayerOptions`."""

    weighting: Weighting
    running_var: RunningVar
    nonfinite: Nonfinite


def sharing_options(given: Any, options: type[NormOptions] = LayerOptions) -> Any:
    """Return `given`, completed by the defaults of the other `SharingOptions` in `options`."""
    names = [name for name in SharingOptions.__annotations__ if hasattr(options, name)]
    for name in given.keys() - names:
        raise TypeError(
            f"got an unexpected keyword argument '{name}': expected {', '.join(names)}."
        )
    return {name: getattr(options, name) for name in names} | given


def takes_sharing_options(function: _Function) -> _Function:
    """Replace `**options` by the names of the options in the signature that `help` shows."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[:-1]
    for name, kind in SharingOptions.__annotations__.items():
        default = getattr(LayerOptions, name)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=kind))
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


class SyncNormBase(nn.Module):
    """Base class of the layers that share statistics: their ranks and options."""

    Options: ClassVar[type[NormOptions]] = LayerOptions

    weighting: Weighting = "element"
    running_var_convention: RunningVar = "unbiased_global"
    compared: Compared  # handshakes, which are also valid for copies of the layer
    # The communicator of this layer alone, whose errors name the layer.
    layer_communicator: LayerCommunicator
    # The accumulator of the current `step_statistics` context, if any.
    step_accumulator: StepAccumulator | None = None
    nonfinite: Nonfinite = None
    fuse_relu = False  # for converted layers, which do not set the attribute

    def configure(self, process_group: CommunicatorLike, **options: Unpack[SharingOptions]) -> None:
        """Set the process group and the options, see `SyncBatchNorm`. Not collective."""
        self.compared = {}
        # Always an attribute of the instance: adding one later would make compiled code recompile.
        self.step_accumulator = None
        self.process_group = process_group
        numbers = {name: vars(self)[name] for name in _NUMBERS if name in vars(self)}
        for name, value in (numbers | sharing_options(options, self.Options)).items():
            setattr(self, self.Options.attributes.get(name, name), value)
        self.norm_options.check()

    @property
    def norm_options(self) -> Any:
        """The current options. They must be equal on all ranks when the layer first runs."""
        return self.Options.of(self, getattr(self, "split_bn", self))

    @property
    def process_group(self) -> Any:
        """The group that was passed; its ProcessGroup for a DeviceMesh, a `Group` for "machine"."""
        communicator: Any = self.layer_communicator.communicator
        is_of_native = getattr(communicator, "is_of_native", False)
        return communicator.native if is_of_native else communicator

    @process_group.setter
    def process_group(self, obj: Any) -> None:
        # A weak reference: the communicator must not keep its layer alive.
        get_layer = weakref.ref(self)

        def if_alive(function: Callable[..., Any], default: Any) -> Callable[..., Any]:
            return lambda *args: default if (v := get_layer()) is None else function(v, *args)

        self.layer_communicator = LayerCommunicator(
            communicator_of(obj),
            if_alive(_path, ""),
            type(self).__qualname__,
            options=if_alive(lambda layer: vars(layer.norm_options), {}),
            detail=if_alive(lambda layer, channels: layer.detail(channels), ""),
            compared=self.compared,
            check_options=if_alive(lambda layer: layer.norm_options.check(), None),
        )
        compiled.register(self.layer_communicator)

    def _as_input(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        part: _BatchNorm | None = None,
    ) -> NormArgs:
        """Build NormArgs for this call; in training, include the running statistics to update.

        If `part` is passed, its running statistics and its `eps` are used.
        """
        bn: Any = self if part is None else part
        running = running_stats_of(bn, self.running_var_convention) if bn.training else None
        parameters: Any = self._parameters  # as in `running_stats_of`
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:  # parametrized
            weight, bias = self.weight, self.bias
        return NormArgs(
            x=x,
            weight=weight,
            bias=bias,
            eps=bn.eps,
            axis=(0, *range(2, getattr(x, "ndim", 2))),  # as `validation.non_channel_axes`
            relu=self.fuse_relu,
            mask=mask,
            residual=residual,
            running=running,
        )

    def detail(self, channels: int) -> str:
        """Return a description of a pass over `channels`, which ranks compare and errors show."""
        return ""

    def local_communicator(self, x: Any) -> Communicator:
        """Return a single-process communicator that reports errors under this layer's name."""
        tensors = (x, *self.parameters(recurse=False))
        if compiled.is_compiling_or_fake(x) or dtensors.contains_dtensor(tensors):
            return LOCAL
        return self.layer_communicator.for_group(LOCAL)

    def extra_repr(self) -> str:
        text, group = super().extra_repr(), self.layer_communicator.communicator
        if not isinstance(group, DefaultCommunicator):
            text += f", process_group={group}"
        return text + self.norm_options.repr_of_changes(text)

    def __setattr__(self, name: str, value: Any) -> None:
        options = type(self).Options  # before `revert_sync_batchnorm` sets `__class__`
        super().__setattr__(name, as_number(value) if name in _NUMBERS else value)
        if torch.compiler.is_compiling():  # compiled code sets no options
            return
        if name in options.attribute_names() and "layer_communicator" in vars(self):
            self.layer_communicator.refresh_options()

    def __getstate__(self) -> dict[str, Any]:
        state: Any = getattr(super(), "__getstate__", dict)()  # new in Python 3.11: object's
        group = self.layer_communicator.communicator
        return {**(state or self.__dict__), "layer_communicator": None if group is LOCAL else group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        group = self.__dict__.pop("layer_communicator")  # a copy gets one of its own
        self.process_group = LOCAL if group is None else group


# The module inside a wrapper of torch's: DistributedDataParallel, compile, checkpoint, FSDP.
_WRAPPED = "module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"


def _path(layer: nn.Module) -> str:
    """Return the path, without wrappers, in the model whose forward pass is running, or ""."""
    find_parts = partial(nn.Module.named_modules, remove_duplicate=False)
    path = find_module_path(layer, nn.Module, find_parts)
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


def updates_running(running: Running | StepAccumulator | None, x: Tensor) -> bool:
    """Return whether a pass over `x` updates the buffers `running`.

    It does not in `step_statistics` or in a recomputation. Compiled code cannot detect a
    recomputation: there, the result is True if `running` has buffers.
    """
    return isinstance(running, Running) and (
        compiled.is_compiling_or_fake(x) or not recompute.in_recomputing()
    )
