"""Batch norm, addition and ReLU in one pass, in models that call them one after the other.

A block is a module whose own forward pass calls batch norms, or an nn.Sequential. `_reading.read`
runs this forward pass once with proxies of torch.fx in the place of tensors. If a layer's output
goes into a ReLU alone, with or without an addition before, the block gets a class of its own that
takes the graph's way in training. Layers and ReLU modules stay as they are, so that every other
caller, evaluation and a block with hooks have the forward pass of before.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.modules.conv import _ConvNd

from multibn.torch_backend import _reading
from multibn.torch_backend.modules import SyncBatchNorm, Synchronized, has_hooks


class Fusion(NamedTuple):
    """What `fuse_batch_norm_relu` has done to each synchronized layer, by the layer's path.

    Parameters
    ----------
    fused
        What the layer's pass ends in: "ReLU" or "addition and ReLU".
    left
        Why the layer's pass stays as it was.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch_backend import SyncBatchNorm, fuse_batch_norm_relu
    >>> fusion = fuse_batch_norm_relu(nn.Sequential(SyncBatchNorm(8), nn.ReLU(), SyncBatchNorm(8)))
    >>> list(fusion.fused), list(fusion.left)
    (['0'], ['2'])
    """

    fused: dict[str, str]
    left: dict[str, str]


def fuse_batch_norm_relu(model: nn.Module) -> Fusion:
    """Let synchronized layers do the ReLU, and the addition before, that follow them.

    Changes `model` in place. For models after `convert_sync_batchnorm`: in training, a
    `SyncBatchNorm` and the nn.ReLU or F.relu that alone reads the layer's output take one pass, and
    so do ``relu(bn(x) + shortcut)`` and ``out += identity; relu(out)``. The numbers are the same.
    State dicts, module paths, hooks, copies and pickles stay; a block's class becomes a subclass of
    the class that the block had. `revert_sync_batchnorm` undoes the fusion, too. Evaluation and
    torch.compile, which fuses by itself, run the forward pass of before. Not collective, but all
    ranks must fuse the same model.

    torch.fx reads the forward pass of each module that calls a synchronized layer, with training on
    and the child modules unread; a module that torch.fx cannot read, because its way depends on
    numbers, for example, stays as it was. A module is read again after one of its attributes was
    set. So a forward pass in training must not depend on anything else than tensors and the
    module's own attributes: neither on global variables nor on attributes of other modules.

    Nothing is fused where the output of the layer has another reader, with another activation than
    nn.ReLU itself, or where the input of an addition could be modified in between: there the layer
    must read the output of a convolution or nn.Linear. While the layer, the ReLU or a module around
    both has hooks, the block runs as before; hooks must be the same on all ranks.

    Parameters
    ----------
    model
        The model, before or after the construction of the optimizer and DistributedDataParallel.

    Returns
    -------
    Fusion
        `fused` and `left`: for the path of each `SyncBatchNorm`, what is fused, or why not.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch_backend import convert_sync_batchnorm, fuse_batch_norm_relu
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> model = convert_sync_batchnorm(model)
    >>> fuse_batch_norm_relu(model)
    Fusion(fused={'1': 'ReLU'}, left={})
    """
    fused: dict[str, str] = {}
    left = {
        path: "no module that torch.fx reads calls the layer"
        for path, part in model.named_modules()
        if isinstance(part, SyncBatchNorm)
    }
    for path, block in list(model.named_modules()):
        if not _may_call_layers(block):
            continue
        prefix = f"{path}." if path else ""
        original = _reading.class_of(block)
        try:
            way, ends, others = _way(block)
        except _reading.ReadingError as error:
            name = path or "the model"
            left |= {
                prefix + child: f"torch.fx cannot read {name}, {original.__qualname__}: {error}"
                for child, part in block.named_children()
                if isinstance(part, SyncBatchNorm)
            }
            continue
        left |= {prefix + child: why for child, why in others.items()}
        if way is not None:
            fused |= {prefix + child: end for child, end in ends.items()}
            block.__class__ = _class(original)
            block.__dict__["_way"] = way
    return Fusion(fused, {path: why for path, why in left.items() if path not in fused})


def unfuse(model: nn.Module) -> None:
    """Give the blocks of `fuse_batch_norm_relu` their classes back."""
    for block in model.modules():
        if isinstance(block, _Block):
            block.__class__ = block.fused_from  # type: ignore[assignment]
            block.__dict__.pop("_way", None)


class _Way(NamedTuple):
    """A block's forward pass in training, and the modules on which this way depends."""

    run: Callable[..., Any]
    reading: _reading.Reading
    hooks: tuple[Any, ...]  # dictionaries: while there are hooks, the block runs as before

    def is_right(self) -> bool:
        return self.reading.is_right()


class _Block(nn.Module):
    """Base of the classes of fused blocks, which no module has by name."""

    fused_from: type[nn.Module]

    # In the instance's dictionary, but not in copies, whose modules are others: the way that was
    # read last, None if nothing can be fused any more. Without an entry the block is to be read.
    _way: _Way | None

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            self.__dict__.pop("_way", None)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__.pop("_way", None)
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *others = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != "_way"}
        return _new, (self.fused_from,), state, *others


_UNREAD: Any = False
_classes: dict[type[nn.Module], type[_Block]] = {}


def _class(original: type[nn.Module]) -> type[_Block]:
    if original not in _classes:
        attributes = {
            "__doc__": f"{original.__qualname__} with ReLUs in its batch norms.",
            "__module__": __name__,
            "forward": _forward(original.forward),
            "fused_from": original,
        }
        _classes[original] = type(f"Fused{original.__name__}", (_Block, original), attributes)
    return _classes[original]


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a block's class; torch.fx and others see the original's arguments."""

    @functools.wraps(original)
    def forward(self: _Block, *args: Any, **kwargs: Any) -> Any:
        if self.training and not kwargs:
            way = self.__dict__.get("_way", _UNREAD)
            if way is _UNREAD or (way is not None and not way.is_right()):
                way = None if torch.compiler.is_compiling() else _read_again(self)
            if way is not None and not any(way.hooks) and way.reading.takes(args):
                return way.run(self, *args)
        return original(self, *args, **kwargs)

    return forward


def _new(original: type[nn.Module]) -> nn.Module:
    """A block without attributes, for copies and pickles."""
    block: nn.Module = object.__new__(_class(original))
    return block


def _read_again(block: _Block) -> _Way | None:
    try:
        way, _, _ = _way(block)
    except _reading.ReadingError:
        way = None
    block.__dict__["_way"] = way
    return way


def _may_call_layers(module: nn.Module) -> bool:
    """Whether to read a module: if a child is, or ends in, a synchronized layer."""
    cls = _reading.class_of(module)
    if isinstance(module, (Synchronized, nn.ModuleList, nn.ModuleDict)):
        return False
    if cls.__module__.startswith("torch.nn.") and cls is not nn.Sequential:
        return False
    reduces = {"__reduce__", "__reduce_ex__", "__deepcopy__", "__setattr__", "__delattr__"}
    if any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in reduces):
        return False
    return any(isinstance(_reading.last(child), SyncBatchNorm) for child in module.children())


def _way(block: nn.Module) -> tuple[_Way | None, dict[str, str], dict[str, str]]:
    """The way through `block`, None if nothing is fused; layers that are, and that are not."""
    reading = _reading.read(block, ends_in=SyncBatchNorm)
    graph, modules = reading.graph, reading.modules
    relu: Any
    layer: Any
    ends: dict[str, str] = {}
    left: dict[str, str] = {}
    involved: list[nn.Module] = list(reading.passed)
    layers = [n for n in graph.nodes if isinstance(modules.get(n), SyncBatchNorm)]
    fusions = {}
    for relu in graph.nodes:
        if _is_relu(relu, modules) and isinstance(source := relu.args[0], fx.Node):
            for layer, residual in _candidates(source, layers):
                if why := _cannot_fuse(layer, residual, source, modules):
                    left[layer.target] = why
                    continue
                fusions[layer] = relu, residual, source
                break
    for layer in layers:
        if layer not in fusions:
            left.setdefault(layer.target, "no ReLU follows")
            continue
        relu, residual, source = fusions[layer]
        with graph.inserting_before(source):
            bn = graph.get_attr(layer.target)
            y = graph.call_function(_rectified, (bn, layer.args[0], residual))
        relu.replace_all_uses_with(y)
        ends[layer.target] = "ReLU" if residual is None else "addition and ReLU"
        involved += [modules[n] for n in (layer, relu) if n in modules]
        for node in dict.fromkeys((relu, source, layer)):
            graph.erase_node(node)
    left = {path: why for path, why in left.items() if path not in ends}
    if not fusions:
        return None, ends, left
    run = type(fx.GraphModule(block, graph)).forward
    hooks = [
        torch_module._global_forward_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    ]
    for module in involved:
        hooks += [getattr(module, name) for name in _HOOKS]
    return _Way(run, reading, tuple(hooks)), ends, left


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_RELUS = {F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_"}
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_INPLACE_ADDITIONS = {operator.iadd, "add_"}


def _is_relu(node: fx.Node, modules: dict[fx.Node, nn.Module]) -> bool:
    module = modules.get(node)
    if module is not None:
        return type(module) is nn.ReLU and "forward" not in vars(module) and not has_hooks(module)
    return node.target in _RELUS and len(node.args) > 0


def _candidates(source: fx.Node, layers: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node | None]]:
    """The layers that a ReLU's input may come from, the latest first, with what is added."""
    if source in layers:
        return [(source, None)]
    terms = source.args
    is_addition = source.target in _ADDITIONS and len(terms) == 2 and not source.kwargs
    if not is_addition or not all(isinstance(term, fx.Node) for term in terms):
        return []
    pairs: Any = [terms] if source.target in _INPLACE_ADDITIONS else [terms, terms[::-1]]
    return sorted((p for p in pairs if p[0] in layers), key=lambda p: -layers.index(p[0]))


def _cannot_fuse(
    node: fx.Node, residual: fx.Node | None, source: fx.Node, modules: dict[fx.Node, nn.Module]
) -> str | None:
    """Why a layer cannot take what follows, if there is a reason."""
    layer: Any = modules[node]
    if type(layer).forward is not SyncBatchNorm.forward or "forward" in vars(layer):
        return "the layer has a forward pass of its own"
    if layer.fuse_relu or len(node.args) != 1 or node.kwargs:
        return "the layer has a ReLU, a residual or a mask already"
    if has_hooks(layer):
        return "the layer has hooks"
    if len(node.users) > 1 or len(source.users) > 1 or node is residual:
        return "the output has other readers"
    if residual is not None:
        # The layer then runs later, when its input must be as it was.
        x: Any = node.args[0]
        produced = isinstance(modules.get(x), (_ConvNd, nn.Linear)) and len(x.users) == 1
        if not produced and node.next is not source:
            return "the input could be modified before the addition"
    return None


def _rectified(layer: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """`relu(layer(x) + residual)`, in one pass where the layer takes this."""
    takes = isinstance(layer, SyncBatchNorm) and layer.training and type(x) is Tensor
    if residual is not None:
        takes = takes and type(residual) is Tensor
        takes = takes and (residual.shape, residual.dtype) == (x.shape, x.dtype)
    if takes and not x.is_nested:
        y: Tensor = layer(x, residual, relu=True)
        return y
    y = layer(x)
    return F.relu(y if residual is None else y + residual)
