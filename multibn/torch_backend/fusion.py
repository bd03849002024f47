"""Batch norm, addition and ReLU in one pass, in models that call them one after the other.

A block is a module whose own forward pass calls batch norms, or an nn.Sequential. `_reading.read`
runs this forward pass once with proxies of torch.fx in the place of tensors. If a layer's output
goes into a ReLU alone, with or without an addition before, the block gets a class of its own that
takes the graph's way in training. Layers and ReLU modules stay as they are, so that every other
caller, evaluation and a block with hooks have the forward pass of before.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.modules.conv import _ConvNd

from multibn.torch_backend import _reading
from multibn.torch_backend.derived import OwnForward
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
    layers = [path for path, part in model.named_modules() if isinstance(part, SyncBatchNorm)]
    left = dict.fromkeys(layers, "no module that torch.fx reads calls the layer")
    for path, block in list(model.named_modules()):
        if not _may_call_layers(block):
            continue
        try:
            way, ends, others = _way(block)
        except _reading.ReadingError as error:
            name = f"{path or 'the model'}, {_reading.class_of(block).__qualname__}"
            why = f"torch.fx cannot read {name}: {error}"
            children = [n for n, m in block.named_children() if isinstance(m, SyncBatchNorm)]
            way, ends, others = None, {}, dict.fromkeys(children or [""], why)
        left |= {_join(path, child): why for child, why in others.items()}
        fused |= {_join(path, child): end for child, end in ends.items()}
        if way is not None:
            block.__class__ = _class(_reading.class_of(block))
            block.__dict__["_way"] = way
    return Fusion(fused, {path: left[path] for path in layers if path not in fused})


def _join(*paths: str) -> str:
    return ".".join(path for path in paths if path)


def unfuse(model: nn.Module) -> None:
    """Give the blocks of `fuse_batch_norm_relu` their classes back."""
    for block in model.modules():
        if isinstance(block, _Block):
            block.__class__ = block.fused_from  # type: ignore[assignment]
            block.__dict__.pop("_way", None)


class _Way(NamedTuple):
    """A block's forward pass in training, with the conditions under which this way is right."""

    run: Callable[..., Any]
    reading: _reading.Reading

    def is_open(self, args: Sequence[Any]) -> bool:
        """Whether a call with `args` can go this way: nobody looks at what is not on it."""
        hooks = torch_module._global_forward_hooks or torch_module._global_backward_hooks
        if hooks or torch_module._global_backward_pre_hooks or not self.reading.takes(args):
            return False
        return not any(has_hooks(module) for module in self.reading.entered[:-1])


class _Block(nn.Module):
    """Base of the classes of fused blocks, which no module has by name."""

    fused_from: type[nn.Module]

    # In the instance's dictionary, but not in copies, whose modules are others: the way that was
    # read last, None if nothing can be fused any more. False: the block is to be read.
    _way: Any = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, state, *others = reduced
        args = [self.fused_from if arg is type(self) else arg for arg in args]
        state = {name: value for name, value in state.items() if name != "_way"}
        return _new, (make, *args), state, *others


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


def _new(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A block without attributes, for copies and pickles; `make(*args)` has the original class."""
    block = make(*args)
    block.__class__ = _class(type(block))
    return block


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a block's class; torch.fx and others see the original's arguments."""

    @functools.wraps(original)
    def forward(self: _Block, *args: Any, **kwargs: Any) -> Any:
        if self.training and not kwargs:
            way = self._way
            if way is False or (way is not None and not way.reading.is_right()):
                way = None if torch.compiler.is_compiling() else _read_again(self)
            if way is not None and way.is_open(args):
                return way.run(self, *args)
        return original(self, *args, **kwargs)

    return forward


def _read_again(block: _Block) -> _Way | None:
    try:
        way, _, _ = _way(block)
    except _reading.ReadingError:
        way = None
    block.__dict__["_way"] = way
    return way


def _may_call_layers(module: nn.Module) -> bool:
    """Whether to read a module: if a child is, or may end in, a synchronized layer."""
    cls = _reading.class_of(module)
    if isinstance(module, OwnForward):
        return module.own_forward is None
    if isinstance(module, (Synchronized, nn.ModuleList, nn.ModuleDict)) or "forward" in vars(
        module
    ):
        return False
    if cls.__module__.startswith("torch.nn.") and cls is not nn.Sequential:
        return False
    reduces = {"__reduce__", "__reduce_ex__", "__deepcopy__"}
    if any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in reduces):
        return False
    return any(_reading.may_end_in(child, SyncBatchNorm) for child in module.children())


def _way(block: nn.Module) -> tuple[_Way | None, dict[str, str], dict[str, str]]:
    """The way through `block`, None if nothing is fused; layers that are, and that are not."""
    reading = _reading.read(block, ends_in=SyncBatchNorm)
    if isinstance(block, OwnForward):
        return _way_of_layer(block, reading)
    graph, modules = reading.graph, reading.modules
    relu: Any
    layer: Any
    ends: dict[str, str] = {}
    left: dict[str, str] = {}
    layers = [n for n in graph.nodes if isinstance(modules.get(n), SyncBatchNorm)]
    norms = {n: own for n in layers if (own := _reading_of_norm(modules[n]))}
    fusions = {}
    for relu in graph.nodes:
        if _is_relu(relu, modules) and isinstance(source := relu.args[0], fx.Node):
            for layer, residual in _candidates(source, layers):
                if why := _cannot_fuse(layer, residual, source, modules, layer in norms):
                    left[layer.target] = why
                    continue
                fusions[layer] = relu, source
                break
    for layer in layers:
        if layer not in fusions:
            left.setdefault(layer.target, _what_follows(layer, modules))
            continue
        relu, source = fusions[layer]
        # The residual may be what an earlier layer of this loop has put in the place of its ReLU.
        residual = next((term for term in source.args if term is not layer), None)
        residual = None if source is layer else residual
        with graph.inserting_before(source):
            bn = graph.get_attr(layer.target)
            activation = graph.get_attr(relu.target) if relu in modules else None
            args = bn, layer in norms, activation, layer.args[0], residual
            y = graph.call_function(_rectified, args)
        if layer in norms:
            reading.entered[:0] = norms[layer].entered
            reading.attributes[:0] = norms[layer].attributes
        relu.replace_all_uses_with(y)
        ends[layer.target] = "ReLU" if residual is None else "addition and ReLU"
        for node in dict.fromkeys((relu, source, layer)):
            graph.erase_node(node)
    left = {path: why for path, why in left.items() if path not in ends}
    if not fusions:
        return None, ends, left
    return _Way(type(fx.GraphModule(block, graph)).forward, reading), ends, left


def _way_of_layer(
    layer: OwnForward, reading: _reading.Reading
) -> tuple[_Way | None, dict[str, str], dict[str, str]]:
    """As `_way`, for a layer whose own forward pass may be batch norm and ReLU, no more."""
    norm, *rest = _own_steps(layer, reading) or (None,)
    if norm is None:
        return None, {}, {"": "the layer has a forward pass of its own"}
    if len(rest) != 1 or not _is_relu(rest[0], reading.modules):
        return None, {}, {"": _what_follows(norm, reading.modules)}
    original, activation = _reading.class_of(layer).forward, reading.modules.get(rest[0])

    def run(layer: Any, x: Any) -> Any:
        if type(x) is not Tensor or x.is_nested or not _is_plain(activation, nn.ReLU):
            return original(layer, x)
        layer._check_input_dim(x)
        return SyncBatchNorm.forward(layer, x, relu=True)

    return _Way(run, reading), {"": "ReLU"}, {}


def _own_steps(layer: nn.Module, reading: _reading.Reading) -> list[fx.Node]:
    """Batch norm and what a layer's own forward pass does then, one by one; [] if not so."""
    source, *nodes, output = [n for n in reading.graph.nodes if n.op != "get_attr"]
    steps = [n for n in nodes if n.target not in _CHECKS]
    chain = [source, *steps, output]
    follows = all(a is b.args[0] for a, b in itertools.pairwise(chain))
    alone = all(len(step.users) == 1 for step in steps)
    return steps if steps and _is_batch_norm(steps[0], layer) and follows and alone else []


def _reading_of_norm(layer: nn.Module) -> _reading.Reading | None:
    """How a layer with a forward pass of its own was read, if this is batch norm alone."""
    if not isinstance(layer, OwnForward) or layer.own_forward is not None:
        return None
    with contextlib.suppress(_reading.ReadingError):
        reading = _reading.read(layer, ends_in=SyncBatchNorm)
        return reading if len(_own_steps(layer, reading)) == 1 else None
    return None


def _is_batch_norm(node: fx.Node, layer: Any) -> bool:
    """Whether a node is the call of torch's batch norm that `layer` itself would be."""
    if node.target is not F.batch_norm:
        return False
    names = "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
    values = dict(zip(names, node.args, strict=False)) | node.kwargs
    actual = [v.target if isinstance(v, fx.Node) else v for v in map(values.get, names[1:])]
    tensors = names[1:5] if layer.track_running_stats else (None, None, *names[3:5])
    expected = [n if n and getattr(layer, n) is not None else None for n in tensors]
    return actual == [*expected, True, layer.momentum or 0.0, layer.eps]


# What a layer asks about its input, before.
_CHECKS = {getattr, operator.eq, operator.ne, torch._assert, "dim"}
_RELUS = {F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_"}
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_INPLACE_ADDITIONS = {operator.iadd, "add_"}


def _is_relu(node: fx.Node, modules: dict[fx.Node, nn.Module]) -> bool:
    module = modules.get(node)
    if module is not None:
        return type(module) is nn.ReLU and _is_plain(module, nn.ReLU)
    return node.target in _RELUS and len(node.args) > 0


def _is_plain(module: nn.Module | None, cls: type[nn.Module]) -> bool:
    """Whether a call of `module` is the forward pass of `cls`, and nobody else looks at it."""
    if module is None:
        return True
    own = type(module).forward is cls.forward and "forward" not in vars(module)
    return own and not has_hooks(module)


def _what_follows(node: fx.Node, modules: dict[fx.Node, nn.Module]) -> str:
    names = [type(modules[reader]).__name__ for reader in node.users if reader in modules]
    return f"no ReLU follows{f', but {names[0]}' if names else ''}"


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
    node: fx.Node,
    residual: fx.Node | None,
    source: fx.Node,
    modules: dict[fx.Node, nn.Module],
    is_norm: bool,
) -> str | None:
    """Why a layer cannot take what follows, if there is a reason."""
    layer: Any = modules[node]
    if has_hooks(layer):
        return "the layer has hooks"
    if not (is_norm or _is_plain(layer, SyncBatchNorm)):
        return "the layer has a forward pass of its own"
    if layer.fuse_relu or len(node.args) != 1 or node.kwargs:
        return "the layer has a ReLU, a residual or a mask already"
    if len(node.users) > 1 or len(source.users) > 1 or node is residual:
        return "the output has other readers"
    if residual is not None:
        # The layer then runs later, when its input must be as it was.
        x: Any = node.args[0]
        produced = isinstance(modules.get(x), (_ConvNd, nn.Linear)) and len(x.users) == 1
        if not produced and node.next is not source:
            return "the input could be modified before the addition"
    return None


def _rectified(layer: Any, is_norm: bool, relu: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """`relu(layer(x) + residual)`, in one pass where the layer takes this.

    With `is_norm`, the layer's own forward pass is batch norm alone, and nobody looks at the layer.
    """
    takes = isinstance(layer, SyncBatchNorm) and layer.training and not layer.fuse_relu
    takes = takes and type(x) is Tensor and not x.is_nested and _is_plain(relu, nn.ReLU)
    takes = takes and (is_norm or _is_plain(layer, SyncBatchNorm))
    if residual is not None:
        takes = takes and type(residual) is Tensor
        takes = takes and (residual.shape, residual.dtype) == (x.shape, x.dtype)
    if not takes:
        y = layer(x)
        y = y if residual is None else y + residual
        return F.relu(y) if relu is None else relu(y)
    if is_norm:
        layer._check_input_dim(x)
        return SyncBatchNorm.forward(layer, x, residual, relu=True)
    return layer(x, residual, relu=True)  # type: ignore[no-any-return]
