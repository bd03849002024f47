"""A module's own forward pass as a graph of torch.fx, in which its child modules are nodes.

`fx.symbolic_trace` is for whole models, exchanges nn.Module.__call__ for all threads while it
runs, and silently leaves out contexts, checkpoints, random numbers and changed attributes. Here the
pass runs on a stand-in for one module, and whatever the graph could not repeat is an error.
"""

import copy
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import GraphAppendingTracer

from multibn.torch_backend.convert.derived import OwnForward
from multibn.torch_backend.layer.modules import has_hooks


class ReadingError(Exception):
    """The forward pass does not only call modules and operations on tensors."""


class Reading(NamedTuple):
    """A graph, and the conditions under which the graph is the forward pass."""

    graph: fx.Graph
    modules: dict[fx.Node, nn.Module]  # that the nodes call
    entered: list[nn.Module]  # whose own forward passes are in the graph; the whole module is last
    attributes: list[tuple[dict[str, object], list[object]]]  # of each of these, and `_parts`
    num_args: int
    asks_types: bool  # tensors would have answered otherwise than the proxies did

    def is_right(self) -> bool:
        """Whether the modules have the attributes and children that they had."""
        for module, (own, parts) in zip(self.entered, self.attributes, strict=True):
            now, now_parts = vars(module), _parts(module)
            for name, value in own.items():
                if now.get(name, own) is not value:
                    return False
            if len(now_parts) != len(parts) or not all(map(operator.is_, now_parts, parts)):
                return False
            # Dynamo of torch 2.11 cannot list a module's attributes.
            if not torch.compiler.is_compiling() and not now.keys() <= own.keys() | _OTHERS:
                return False
        return True

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether the graph holds for `args`."""
        kinds = (list, tuple) if self.asks_types else (Tensor, list, tuple)
        for a in args:  # a generator would cost a frame for each
            if not isinstance(a, kinds):
                return False
        return len(args) == self.num_args


def read(module: nn.Module, /, *, ends_in: type[nn.Module]) -> Reading:
    """Run the forward pass of `class_of(module)`, with `module.training` True.

    A child whose output is that of a module of class `ends_in` is entered; others are nodes.

    Raises
    ------
    ReadingError
        If the pass depends on numbers, types or random numbers, changes attributes, or sets a
        context such as torch.no_grad.
    """
    arguments = list(signature(_own_class(module).forward).parameters.values())[1:]
    if any(a.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL) for a in arguments):
        raise ReadingError("it takes any number of inputs")
    required = [a for a in arguments if a.default is Parameter.empty]
    if any(a.kind is Parameter.KEYWORD_ONLY for a in required):
        raise ReadingError("it has an input that must be passed by keyword")
    tracer = _Tracer(ends_in)
    proxies = [tracer.create_proxy("placeholder", a.name, (), {}) for a in required]
    y = tracer.enter(module, "", proxies)
    tracer.create_node("output", "output", (tracer.create_arg(y),), {})
    attributes = [(_attributes(m), _parts(m)) for m in tracer.entered]
    return Reading(
        *(tracer.graph, tracer.modules, tracer.entered, attributes),
        num_args=len(required),
        asks_types=tracer.asks_types,
    )


def may_end_in(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether `module`, or the module that gives its output, may be a `cls`."""
    own, children = class_of(module), [*module.children()]
    if own.forward is nn.Sequential.forward:
        return bool(children) and may_end_in(children[-1], cls)
    if isinstance(module, cls) or own.__module__.startswith("torch.nn."):
        return isinstance(module, cls)
    sequences = (c for c in children if class_of(c).forward is nn.Sequential.forward)
    return any(isinstance(c, cls) for c in children) or any(may_end_in(c, cls) for c in sequences)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, or that before `fuse_batch_norm_relu`."""
    cls: type[nn.Module] = getattr(type(module), "fused_from", type(module))
    return cls


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class whose forward pass is the module's own; a converted layer's is the original."""
    return module.converted_from if isinstance(module, OwnForward) else class_of(module)


# Attributes that say nothing about the forward pass: every module's, whose contents are looked at
# elsewhere, and marks of others. Lightning replaces torch.compile, and leaves `_compile_kwargs`.
_MARKS = {"pool", "_way", "_is_torch_compile", "_compiled_call_impl", "_compile_kwargs"}
_OTHERS = {*vars(nn.Module()), *_MARKS}


def _attributes(module: nn.Module) -> dict[str, object]:
    """The attributes of a module, to be compared by identity in each call."""
    return {name: value for name, value in vars(module).items() if name not in _OTHERS}


def _parts(module: nn.Module) -> list[object]:
    """The children of a module, and which parameters and buffers are None."""
    parameters, buffers = module._parameters, module._buffers
    parts: list[object] = [*module._modules.values()]
    if parameters or buffers:
        parts += [t is None for t in (*parameters.values(), *buffers.values())]
    return parts


def _sizes(module: nn.Module) -> dict[str, Any]:
    """What changes with an attribute: identities, lengths of lists, and versions of tensors."""
    sizes: dict[str, Any] = {}
    for name, value in (module.__dict__ | module._parameters | module._buffers).items():
        length = len(value) if type(value) in (list, dict, set) else None
        sizes[name] = id(value), length, getattr(value, "_version", None)
    return sizes


def _ambient() -> tuple[Any, ...]:
    """Contexts that act on operations, and that a graph does not have."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        *[torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        *[torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        # A checkpoint.
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


class _Proxy(fx.Proxy):
    """As torch.fx's, which takes `x += y` for `x = x + y`, and does not notice isinstance."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        tracer: Any = self.tracer
        tracer.asks_types = True
        return _Proxy


def _inplace(function: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], fx.Proxy]:
    return lambda proxy, other: proxy.tracer.create_proxy(
        "call_function", function, (proxy, other), {}
    )


_OPERATIONS = "add, sub, mul, truediv, floordiv, mod, pow, matmul, and, or, xor"
for _name in _OPERATIONS.split(", "):
    setattr(_Proxy, f"__i{_name}__", _inplace(getattr(operator, f"i{_name}")))


class _Tracer(GraphAppendingTracer):
    def __init__(self, ends_in: type[nn.Module]) -> None:
        super().__init__(fx.Graph())
        self.ends_in, self.ambient = ends_in, _ambient()
        self.own: dict[Tensor, str] = {}
        self.modules: dict[fx.Node, nn.Module] = {}
        self.entered: list[nn.Module] = []
        self.asks_types = False

    def enter(self, module: nn.Module, path: str, args: Sequence[Any]) -> Any:
        """The output of a module's own forward pass, whose operations become nodes."""
        twin = self._twin(module, f"{path}." if path else "")
        forward = type(twin).forward
        sizes, states = _sizes(twin), (torch.get_rng_state(), random.getstate())
        try:
            y = forward(twin, *args)
        except ReadingError:
            raise
        except Exception as error:  # whatever another's code raises for a proxy
            raise ReadingError(f"{type(error).__name__}: {error}") from error
        finally:
            draws = not torch.equal(torch.get_rng_state(), states[0])
            draws = draws or random.getstate() != states[1]
            torch.set_rng_state(states[0])
            random.setstate(states[1])
        if _sizes(twin) != sizes:
            raise ReadingError("it sets an attribute")
        if draws:
            raise ReadingError("it draws random numbers")
        if self.asks_types:
            names = getattr(getattr(forward, "__code__", None), "co_names", ())
            if path or "isinstance" not in names or {"list", "tuple"} & {*names}:
                raise ReadingError("it asks for the types of its inputs")
        self.entered.append(module)
        return y

    def _twin(self, module: nn.Module, prefix: str) -> Any:
        """Stands for `module`, in training; its attributes may be set, its tensors have no data."""
        twin: Any = object.__new__(_own_class(module))
        twin.__dict__ |= {
            name: copy.copy(value) if type(value) in (list, dict, set) else value
            for name, value in vars(module).items()
        }
        twin.__dict__ |= {
            "training": True,
            "_modules": {
                name: None if child is None else _Child(child, prefix + name, self)
                for name, child in module._modules.items()
            },
            "_parameters": self._without_data(module._parameters, prefix),
            "_buffers": self._without_data(module._buffers, prefix),
        }
        if isinstance(module, OwnForward):  # these ask for numbers, and count
            twin.__dict__["_check_input_dim"] = lambda x: None
            twin._buffers["num_batches_tracked"] = None
        return twin

    def _without_data(self, tensors: Any, prefix: str) -> dict[str, Tensor | None]:
        """Stand for tensors of a module; the pass can neither read nor change their numbers."""
        own: dict[str, Tensor | None] = dict.fromkeys(tensors)
        for name, tensor in tensors.items():
            if tensor is not None:
                meta = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, tensor.requires_grad)
                self.own[meta], own[name] = prefix + name, meta
        return own

    def call(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """The output of a child module."""
        if not kwargs and not has_hooks(module) and "forward" not in vars(module):
            if type(module) is nn.Identity and len(args) == 1:
                self.entered.append(module)
                return args[0]
            if not isinstance(module, self.ends_in) and may_end_in(module, self.ends_in):
                before = len(self.graph.nodes), len(self.entered), self.asks_types
                try:
                    y = self.enter(module, path, args)
                    if isinstance(y, _Proxy) and isinstance(self.modules.get(y.node), self.ends_in):
                        return y
                except ReadingError:
                    pass
                for node in reversed([*self.graph.nodes][before[0] :]):
                    self.graph.erase_node(node)
                del self.entered[before[1] :]
                self.asks_types = before[2]
        y = self.create_proxy("call_module", path, args, kwargs)
        self.modules[y.node] = module
        return y

    def proxy(self, node: fx.Node) -> _Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _ambient() != self.ambient:
            raise ReadingError("it sets a context, such as torch.no_grad or a checkpoint")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            if a not in self.own:
                raise ReadingError("it takes a tensor that is not its own")
            return self.create_node("get_attr", self.own[a], (), {})
        is_container = type(a) in (dict, list, tuple, torch.Size) or hasattr(a, "_fields")
        if isinstance(a, (dict, list, tuple)) and not is_container:
            # torch.fx would make a plain dict of an OrderedDict.
            raise ReadingError(f"it makes a {type(a).__qualname__}")
        if isinstance(a, (torch.dtype, torch.device)) and self.own:
            raise ReadingError("it may depend on the dtype or device of its own tensors")
        return super().create_arg(a)


class _Child:
    """Stands for a child module."""

    def __init__(self, module: nn.Module, path: str, tracer: _Tracer) -> None:
        self.__module, self.__path, self.__tracer = module, path, tracer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__tracer.call(self.__module, self.__path, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__module, name)
        if isinstance(value, nn.Module):
            return _Child(value, f"{self.__path}.{name}", self.__tracer)
        if callable(value) or isinstance(value, Tensor):
            raise ReadingError(f"it reads `{name}` of {self.__path}")
        return value

    def __bool__(self) -> bool:
        return not isinstance(self.__module, (nn.ModuleList, nn.ModuleDict)) or len(self) > 0

    def __len__(self) -> int:
        return len(self.__module._modules)

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self.__module, (nn.ModuleList, nn.Sequential)):
            raise ReadingError(f"it goes through {self.__path}")
        for name in self.__module._modules:
            yield self.__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(self.__module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            raise ReadingError(f"it takes a part of {self.__path}")
        names = list(self.__module._modules)
        return self.__getattr__(key if isinstance(key, str) else names[operator.index(key)])
