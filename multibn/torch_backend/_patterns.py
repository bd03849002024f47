"""Batch norm, addition and ReLU in the graph of a forward pass, and one call in their place."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from multibn.torch_backend import _reading
from multibn.torch_backend.convert.derived import OwnForward
from multibn.torch_backend.layer.modules import SyncBatchNorm, has_hooks

#: A forward pass, None if nothing is fused; layers that are, by path, and why others are not.
Result: TypeAlias = tuple[Callable[..., Any] | None, dict[str, str], dict[str, str]]


def fuse(block: nn.Module, reading: _reading.Reading) -> Result:
    """The forward pass of `block` with fused layers. Changes the graph of `reading`.

    The forward pass is right as long as `reading` is, to which this function adds conditions.
    """
    if isinstance(block, OwnForward):
        return _fuse_layer(block, reading)
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
            for layer in _candidates(source, layers):
                if why := _cannot_fuse(layer, source, modules, layer in norms):
                    left[layer.target] = why
                    continue
                fusions[layer] = relu, source
                break
    for layer in layers:
        if layer not in fusions:
            left.setdefault(layer.target, _what_follows(layer, modules))
            continue
        relu, source = fusions[layer]
        residual = _residual(layer, source)  # maybe the call in the place of an earlier ReLU
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
    return type(fx.GraphModule(block, graph)).forward, ends, left


def _fuse_layer(layer: OwnForward, reading: _reading.Reading) -> Result:
    """As `fuse`, for a layer whose own forward pass may be batch norm and ReLU, no more."""
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

    return run, {"": "ReLU"}, {}


def _own_steps(layer: nn.Module, reading: _reading.Reading) -> list[fx.Node]:
    """Batch norm and what a layer's own forward pass does then, one by one; [] if not so."""
    source, *nodes, output = [n for n in reading.graph.nodes if n.op != "get_attr"]
    steps = [n for n in nodes if n.target not in _CHECKS]
    chain = [source, *steps, output]
    follows = all(b.args[:1] == (a,) for a, b in itertools.pairwise(chain))
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


# Operations by which a layer checks its input before it normalizes.
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


def _candidates(source: Any, layers: Sequence[fx.Node]) -> list[fx.Node]:
    """The layers from which a ReLU's input may come, by itself or in a sum, the latest first."""
    if source in layers:
        return [source]
    if source.target not in _ADDITIONS or len(source.args) != 2 or source.kwargs:
        return []
    if not all(isinstance(term, fx.Node) for term in source.args):
        return []
    terms = source.args[:1] if source.target in _INPLACE_ADDITIONS else source.args
    return sorted((n for n in terms if n in layers), key=layers.index, reverse=True)


def _residual(layer: fx.Node, source: fx.Node) -> Any:
    """The node that is added to a layer's output, None if `source` is this output itself."""
    if source is layer:
        return None
    return next((term for term in source.args if term is not layer), layer)


def _cannot_fuse(
    node: fx.Node, source: fx.Node, modules: dict[fx.Node, nn.Module], is_norm: bool
) -> str | None:
    """Why a layer cannot take what follows, if there is a reason."""
    layer: Any = modules[node]
    residual = _residual(node, source)
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
        takes = takes and type(residual) is Tensor and not residual.is_nested
        takes = takes and (residual.shape, residual.dtype) == (x.shape, x.dtype)
        takes = takes and residual.layout == x.layout
    y: Tensor
    if not takes:
        y = layer(x)
        y = y if residual is None else y + residual
        y = F.relu(y) if relu is None else relu(y)
    elif is_norm:
        layer._check_input_dim(x)
        y = SyncBatchNorm.forward(layer, x, residual, relu=True)
    else:
        y = layer(x, residual, relu=True)
    return y
