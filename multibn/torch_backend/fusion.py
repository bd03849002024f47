"""Batch norm, addition and ReLU in one pass, in models that call them one after the other.

A block is a module whose own forward pass calls batch norms, an nn.Sequential, or a layer whose own
forward pass ends in a ReLU. `_reading.read` runs this forward pass once with proxies of torch.fx in
the place of tensors; `_patterns.fuse` looks in the graph for layers whose output goes into a ReLU
alone, with or without an addition before. If there are some, the block gets a class of its own that
takes the graph's way in training. Layers and ReLU modules stay as they are, so that every other
caller and evaluation have the forward pass of before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from multibn.torch_backend import _patterns, _reading
from multibn.torch_backend.convert.derived import OwnForward
from multibn.torch_backend.layer.modules import SyncBatchNorm, Synchronized, has_hooks


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
    so do ``relu(bn(x) + shortcut)`` and ``out += identity; relu(out)``. A layer that ends in a ReLU
    of its own, such as timm's BatchNormAct2d, takes one pass, too. The numbers are the same. State
    dicts, module paths, hooks, copies and pickles stay; a block's class becomes a subclass of the
    class that the block had. `revert_sync_batchnorm` undoes the fusion, too. Evaluation runs the
    forward pass of before. Not collective, but all ranks must fuse the same model.

    torch.fx reads the forward pass of each module that calls a synchronized layer, with training
    on. The child modules stay unread, but for those whose output is a layer's. A module that
    torch.fx cannot read, because its way depends on numbers, for example, stays as it was. A module
    is read again after one of its attributes or children was set, in the next call; torch.compile
    notices this as for any module. So a forward pass in training must not depend on anything else
    than tensors and the module's own attributes: neither on global variables nor on attributes of
    other modules, nor on what a list or a dictionary holds.

    Nothing is fused where the output of the layer has another reader, with another activation than
    nn.ReLU itself, or where the input of an addition could be modified in between: there the layer
    must read the output of a convolution or nn.Linear. While the layer or the ReLU has a hook, both
    run one after the other, and hooks see what they saw. While an nn.Sequential or another module
    around both has a hook, its block runs as before; such hooks must be the same on all ranks.
    Compiled code calls a hook that was registered later as torch does for any module: not unless
    ``torch._dynamo.config.skip_nnmodule_hook_guards`` is False.

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
        entered = self.reading.entered
        return len(entered) == 1 or not any(has_hooks(module) for module in entered[:-1])


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
    if isinstance(module, (Synchronized, nn.ModuleList, nn.ModuleDict)):
        return False
    if "forward" in vars(module):
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
    run, ends, left = _patterns.fuse(block, reading)
    return None if run is None else _Way(run, reading), ends, left
