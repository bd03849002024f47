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

from multibn.torch_backend.modules import has_hooks

_COLLECTIONS = (list, dict, set)


class ReadingError(Exception):
    """The forward pass does not only call modules and operations on tensors."""


class Reading(NamedTuple):
    """A graph, and the conditions under which the graph is the forward pass."""

    graph: fx.Graph
    modules: dict[fx.Node, nn.Module]  # that the nodes call
    passed: list[nn.Module]  # modules without a node: each nn.Sequential and nn.Identity gone into
    children: list[tuple[dict[str, Any], tuple[Any, ...]]]  # of the module, and of those gone into
    num_args: int
    asks_types: bool  # tensors would have answered otherwise than the proxies did

    def is_right(self) -> bool:
        """Whether the child modules are those of the graph."""
        return all(tuple(now.values()) == before for now, before in self.children)

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether the graph holds for `args`."""
        kinds = (list, tuple) if self.asks_types else (Tensor, list, tuple)
        return len(args) == self.num_args and all(isinstance(a, kinds) for a in args)


def read(module: nn.Module, /, *, ends_in: type[nn.Module]) -> Reading:
    """Run the forward pass of `class_of(module)`, with `module.training` True.

    An nn.Sequential that ends in a module of class `ends_in` is gone into; other children are not.

    Raises
    ------
    ReadingError
        If the pass depends on numbers, types or random numbers, changes attributes, or sets a
        context such as torch.no_grad.
    """
    cls = class_of(module)
    names = getattr(cls.forward, "__code__", (lambda: None).__code__).co_names
    asks_types = "isinstance" in names
    if asks_types and {"list", "tuple"} & {*names}:
        raise ReadingError("it asks for the types of its inputs")
    tracer = _Tracer(module, ends_in)
    arguments = list(signature(cls.forward).parameters.values())[1:]
    if any(a.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL) for a in arguments):
        raise ReadingError("it takes any number of inputs")
    required = [a for a in arguments if a.default is Parameter.empty]
    if any(a.kind is Parameter.KEYWORD_ONLY for a in required):
        raise ReadingError("it has an input that must be passed by keyword")
    twin: Any = object.__new__(cls)
    twin.__dict__ |= {
        name: copy.copy(value) if type(value) in _COLLECTIONS else value
        for name, value in module.__dict__.items()
    }
    twin.__dict__ |= {
        "training": True,
        "_modules": {
            name: child if child is None else _Child(child, name, tracer)
            for name, child in module._modules.items()
        },
        "_parameters": {
            name: tracer.without_data(name, t) for name, t in module._parameters.items()
        },
        "_buffers": {name: tracer.without_data(name, t) for name, t in module._buffers.items()},
    }
    before = _sizes(twin), torch.get_rng_state(), random.getstate()
    try:
        proxies = [tracer.create_proxy("placeholder", a.name, (), {}) for a in required]
        y = cls.forward(twin, *proxies)
        tracer.create_node("output", "output", (tracer.create_arg(y),), {})
    except ReadingError:
        raise
    except Exception as error:  # whatever another's code raises for a proxy
        raise ReadingError(f"{type(error).__name__}: {error}") from error
    if _sizes(twin) != before[0]:
        raise ReadingError("it sets an attribute")
    if not torch.equal(torch.get_rng_state(), before[1]) or random.getstate() != before[2]:
        raise ReadingError("it draws random numbers")
    inside = [module, *(m for m in tracer.passed if isinstance(m, nn.Sequential))]
    children: Any = [(m._modules, tuple(m._modules.values())) for m in inside]
    return Reading(tracer.graph, tracer.modules, tracer.passed, children, len(required), asks_types)


def last(module: nn.Module) -> nn.Module:
    """The module that gives the output of an nn.Sequential, through any number of these."""
    while _is_sequence(module) and module._modules:
        children: Any = module._modules.values()
        module = [*children][-1]
    return module


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, or that before `fuse_batch_norm_relu`."""
    cls: type[nn.Module] = getattr(type(module), "fused_from", type(module))
    return cls


def _is_sequence(module: nn.Module) -> bool:
    return class_of(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def _sizes(module: nn.Module) -> dict[str, Any]:
    """What changes with an attribute: identities, lengths of lists, and versions of tensors."""
    sizes: dict[str, Any] = {}
    for name, value in (module.__dict__ | module._parameters | module._buffers).items():
        length = len(value) if type(value) in _COLLECTIONS else None
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
    """As torch.fx's, which takes `x += y` for `x = x + y`."""


def _inplace(function: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], fx.Proxy]:
    return lambda proxy, other: proxy.tracer.create_proxy(
        "call_function", function, (proxy, other), {}
    )


_OPERATIONS = "add, sub, mul, truediv, floordiv, mod, pow, matmul, and, or, xor"
for _name in _OPERATIONS.split(", "):
    setattr(_Proxy, f"__i{_name}__", _inplace(getattr(operator, f"i{_name}")))


class _Tracer(GraphAppendingTracer):
    def __init__(self, root: nn.Module, ends_in: type[nn.Module]) -> None:
        super().__init__(fx.Graph())
        self.root, self.ends_in, self.ambient = root, ends_in, _ambient()
        self.own: dict[int, str] = {}
        self.modules: dict[fx.Node, nn.Module] = {}
        self.passed: list[nn.Module] = []

    def proxy(self, node: fx.Node) -> _Proxy:
        return _Proxy(node, self)

    def without_data(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Stands for a tensor of the module; the pass can neither read nor change its numbers."""
        if tensor is None:
            return None
        own = tensor.detach().to("meta")
        own = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        self.own[id(own)] = name
        return own

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _ambient() != self.ambient:
            raise ReadingError("it sets a context, such as torch.no_grad or a checkpoint")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if id(a) not in self.own:
                raise ReadingError("it takes a tensor that is not its own")
            return self.create_node("get_attr", self.own[id(a)], (), {})
        if isinstance(a, (torch.dtype, torch.device)) and self.own:
            raise ReadingError("it may depend on the dtype or device of its own tensors")
        return super().create_arg(a)

    def call(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """The output of a child module."""
        plain = len(args) == 1 and not kwargs and not has_hooks(module)
        if plain and type(module) is nn.Identity:
            self.passed.append(module)
            return args[0]
        if plain and _is_sequence(module) and isinstance(last(module), self.ends_in):
            self.passed.append(module)
            (y,) = args
            children: Any = module._modules.items()  # a module may be there twice
            for name, child in children:
                y = self.call(child, f"{path}.{name}", (y,), {})
            return y
        y = self.create_proxy("call_module", path, args, kwargs)
        self.modules[y.node] = module
        return y


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
