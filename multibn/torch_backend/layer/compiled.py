"""A layer's pass in compiled code: operators for sums and message, the compiler for elements.

The operators are the eager kernels, called without a look inside, in the order of the layers. They
return a few numbers per channel. The compiler fuses `(x - centre) * scale + shift`, and the like of
the gradient, with the operations around the layer. Meta and fake tensors take the same way.

An operator takes only tensors, numbers and strings, so a communicator is passed as its id.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints
from weakref import WeakValueDictionary

import array_api_compat.torch  # noqa: F401  (traced code finds it, and must not load it)
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from multibn._typing import Array, Weighting
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import LayerCommunicator
from multibn.engine import recompute
from multibn.engine.plan import Gradient, NormArgs, Plan
from multibn.engine.running import StepAccumulator
from multibn.engine.statistics import BatchStatistics
from multibn.kernels import Running, reference, select, steps
from multibn.kernels.layout import channels
from multibn.kernels.spec import PackedStatistics, unpack
from multibn.torch_backend._torch_private import (
    CUDA_GRAPH_TREES,
    IS_EXPORTING,
    EffectType,
    FakeTensor,
    register_effectful_op,
)
from multibn.torch_backend.layer import autograd, dtensors, functional, validation

# Weak: a communicator ends with its layer, and so does the graph compiled for the layer.
_communicators: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


def register(communicator: Communicator, /) -> None:
    """Let the operators find a communicator by its id."""
    _communicators[id(communicator)] = communicator


def is_compiling_or_fake(x: Any, /) -> bool:
    """Whether `forward` is to take `x`: in compiled code, and without data."""
    return torch.compiler.is_compiling() or _has_no_data(x)


def is_exporting_or_tracing() -> bool:
    """Whether an exported program or a trace is made, which can hold torch's own batch norm."""
    return getattr(torch.compiler, IS_EXPORTING) or torch.jit.is_tracing()


def _has_no_data(x: Any) -> bool:
    return isinstance(x, FakeTensor) or getattr(x, "is_meta", False)


def forward(
    args: NormArgs, num_channels: int, communicator: Communicator, /, *, weighting: Weighting
) -> tuple[Tensor, BatchStatistics]:
    """Do as `functional.forward`, in compiled code and without data, too.

    Compiled code cannot tell whether it runs in a recomputation. There, a batch has a count of 0,
    by which running statistics do not move.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and getattr(torch.compiler, IS_EXPORTING):
        raise RuntimeError(
            "torch.export cannot export layers that share statistics in training: the program "
            "would need the processes of this run. Call model.eval() first, or export a copy of "
            "the model after revert_sync_batchnorm."
        )
    arguments: Any = args, num_channels, communicator
    # No operator takes these and plain tensors.
    if compiling and dtensors.among((args.x, args.weight, args.bias)):
        torch._dynamo.graph_break(
            msg="a layer does not compile its forward pass with a DTensor, and runs it as it is. "
            "Call torch.compile without fullgraph=True."
        )
        return torch.compiler.disable(functional.forward)(*arguments, weighting=weighting)
    # Dynamo may compile that frame even where it skips this one, so is_compiling_or_fake is wrong.
    if autograd.is_transformed() if compiling else not _has_no_data(args.x):
        return functional.forward(*arguments, weighting=weighting)
    if not compiling:
        validation.check_input(args.x, num_channels)
        try:
            validation.check_options(args)
        except ValueError as error:  # of a layer with data, whose other ranks may have some
            validation.raise_on_all_ranks(error, args.x, num_channels, communicator)
    sharing = num_channels, id(communicator), weighting
    y, *numbers = torch.ops.multibn.forward(*_spread(args), *sharing)
    batch = BatchStatistics(*numbers)
    of_all = args.x.numel() // max(batch.mean.numel(), 1)
    count: Any = of_all if args.mask is None else args.mask.sum()
    if isinstance(args.running, StepAccumulator):
        args.running.add(batch, local_count=count)
    elif args.running is not None:
        local_count = torch.ones_like(batch.count) * count
        torch.ops.multibn.update_running(*args.running, *batch[:3], local_count)
    return y, batch


def mask_of(
    x: Any, mask: Any, lengths: Any, num_channels: int, communicator: Communicator
) -> Tensor | None:
    """Do as `validation.mask_of`; in compiled code an operator does so."""
    if (mask is None and lengths is None) or not torch.compiler.is_compiling():
        return validation.mask_of(x, mask, lengths, num_channels, communicator)
    checked: Tensor = torch.ops.multibn.mask(x, mask, lengths, num_channels, id(communicator))
    return checked


_LIBRARY = torch.library.Library("multibn", "DEF")


def operator(
    schema: str, like: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the operator of this schema in the namespace `multibn`.

    The compiler looks inside unless `like` says what the operator returns, in shape and dtype. Such
    operators talk: their order stays, none is dropped or repeated, and no CUDA graph holds one.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=[] if like is None else [torch.Tag.cudagraph_unsafe])
        kind = "CompositeImplicitAutograd" if like is None else "CompositeExplicitAutograd"
        _LIBRARY.impl(name, function, kind)
        if like is not None:
            torch.library.register_fake(f"multibn::{name}", like, lib=_LIBRARY)
            register_effectful_op(getattr(torch.ops.multibn, name).default, EffectType.ORDERED)
        return function

    return define


# The fields of an `NormArgs`, whose running statistics no operator moves beside the batch.
_FIELDS = [name for name in NormArgs._fields if name != "running"]
_KINDS: dict[Any, str] = {Array: "Tensor", Array | None: "Tensor?", tuple[int, ...]: "int[]"}
_KINDS |= {kind: kind.__name__ for kind in (float, bool, int, str)}
_INPUT = ", ".join(f"{_KINDS[get_type_hints(NormArgs)[name]]} {name}" for name in _FIELDS)
_SHARING = "SymInt num_channels, int communicator, str weighting"


def _gather(*arguments: Any) -> tuple[Any, ...]:
    """The input of an operator, and all other arguments."""
    args = NormArgs(**dict(zip(_FIELDS, arguments, strict=False)))
    return args._replace(axis=tuple(args.axis)), *arguments[len(_FIELDS) :]


def _spread(args: NormArgs) -> list[Any]:
    """The arguments of an operator that are an input."""
    return [getattr(args, name) for name in _FIELDS]


def _up_to_elements(x: Tensor) -> Any:
    """The kernels for `x`, but for the passes that write: coefficients take their place."""
    kernels = select(x)
    prepared = getattr(kernels, "PreparedStep", None)
    return SimpleNamespace(
        PreparedStep=prepared and partial(prepared, coefficients=True),
        begin_forward=kernels.begin_forward,
        finish_forward=partial(kernels.finish_forward, coefficients=True),
        normalize=partial(kernels.normalize, coefficients=True),
        begin_backward=kernels.begin_backward,
        finish_backward=partial(kernels.finish_backward, coefficients=True),
    )


def _plan(
    args: NormArgs, sharing: Any, weighting: Weighting, needed: bool, num_channels: int | None
) -> Plan:
    """The plan of a layer for such inputs, of which the first is checked in a forward pass."""
    # Only then: the host looks at messages that it may keep with fewer calls.
    copied = CUDA_GRAPH_TREES in sys.modules
    key = autograd.plan_key(args, weighting), needed, copied
    plan: Plan | None = getattr(sharing, "plans", {}).get(key)
    if plan is None:
        if num_channels is not None:  # not in a backward pass
            validation.validate_call(args, num_channels, sharing)
        options: Any = {"weighting": weighting, "needs_gradient": needed, "copied": copied}
        plan = Plan(args, sharing, verbs=_up_to_elements(args.x), **options)
        if key[0] is not None and isinstance(sharing, LayerCommunicator):
            sharing.keep(key, plan)
    return plan


def _coefficients_like(x: Tensor, shape: Sequence[int], count: int) -> Tensor:
    # The operator will refuse integers.
    dtype = reference.arithmetic_dtype(torch, x.dtype) if x.is_floating_point() else torch.float64
    return x.new_empty((count, *shape), dtype=dtype)


def _forward_sums_like(*arguments: Any) -> list[Tensor]:
    args, num_channels, *_ = _gather(*arguments)
    fitting = (*args.x.shape[:1], num_channels, *args.x.shape[2:])  # the input may not fit
    shape = channels(fitting, args.axis)
    numbers = args.x.new_empty(2 * math.prod(shape) + 2, dtype=torch.float64)
    return [_coefficients_like(args.x, shape, 3), numbers]


@operator(f"forward_sums({_INPUT}, {_SHARING}, bool needed) -> Tensor[]", _forward_sums_like)
def _forward_sums(*arguments: Any) -> list[Tensor]:
    """The coefficients of the output, and all numbers of the statistics in a row. Collective."""
    args, num_channels, communicator, weighting, needed = _gather(*arguments)
    args, sharing = autograd.with_kernel_layout(args), _communicators[communicator]
    with torch.no_grad(), autograd.without_autocast(args.x):
        plan = _plan(args, sharing, weighting, needed, num_channels)
        coefficients, batch = plan.forward(args)
    if isinstance(batch, PackedStatistics):
        numbers = batch.numbers
    else:
        numbers = torch.cat([v.reshape(-1) for v in batch])
    if recompute.in_recomputing():  # with a count of 0, running statistics do not move
        numbers[-2] = 0.0
    return [coefficients, numbers]


def _backward_sums_like(dy: Tensor, *arguments: Any) -> list[Tensor]:
    args, _, needs_dx, _ = _gather(*arguments)
    given = args.weight, args.bias
    parameters = [args.x.new_empty(0) if p is None else torch.empty_like(p) for p in given]
    return (
        parameters + [_coefficients_like(args.x, channels(args.x.shape, args.axis), 4)] * needs_dx
    )


@operator(
    f"backward_sums(Tensor dy, {_INPUT}, Tensor numbers, bool needs_dx, int communicator)"
    " -> Tensor[]",
    _backward_sums_like,
)
def _backward_sums(dy: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of weight and bias, and the coefficients of that of `x`. Collective."""
    args, numbers, needs_dx, communicator = _gather(*arguments)
    batch = PackedStatistics(numbers, channels(args.x.shape, args.axis))
    g = Gradient(dy, autograd.with_kernel_layout(args), batch, needs_dx=needs_dx)
    sharing = _communicators[communicator]
    with torch.no_grad(), autograd.without_autocast(args.x):
        if torch.is_anomaly_enabled():
            autograd.raise_for_nan_gradient(g, sharing)
        dx, _, *parameters = _plan(g.input, sharing, "element", True, None).backward(g)
    found = [*parameters, dx] if needs_dx else parameters
    return [args.x.new_empty(0) if v is None else v for v in found]


@operator(
    "mask(Tensor x, Tensor? mask, Tensor? lengths, SymInt num_channels, int group) -> Tensor",
    lambda x, *_: x.new_empty((x.shape[0], 1, *x.shape[2:]), dtype=torch.bool),
)
def _mask(x: Tensor, mask: Any, lengths: Any, num_channels: int, communicator: int) -> Tensor:
    """The engine's mask. Collective if it raises."""
    checked: Any = validation.mask_of(x, mask, lengths, num_channels, _communicators[communicator])
    # New memory, as an operator's output must be, with the strides that the compiler is told.
    return checked.clone(memory_format=torch.contiguous_format)


# Dynamo writes down the calls of `forward` and `update_running`; what follows sees the operations.
@operator(f"forward({_INPUT}, {_SHARING}) -> Tensor[]")
def _forward(*arguments: Any) -> list[Tensor]:
    """The output, and the numbers of `BatchStatistics`. Collective."""
    args, num_channels, communicator, weighting = _gather(*arguments)
    needed = torch.is_grad_enabled() and args.x.requires_grad
    try:
        validation.check_input(args.x, num_channels)
        validation.check_options(args)
    except (TypeError, ValueError):  # which all ranks are to learn when the code runs
        with torch.no_grad():
            sums = torch.ops.multibn.forward_sums(*arguments, needed)
        y, batch = torch.empty_like(args.x), _statistics(*sums)
    else:
        plan = _Plan(_communicators[communicator], weighting, needed)
        y, batch = autograd.forward(plan, args)
    return [y, *unpack(batch)]


def _statistics(coefficients: Tensor, numbers: Tensor) -> PackedStatistics:
    """The statistics among the results of `forward_sums`."""
    return PackedStatistics(numbers, tuple(coefficients.shape[1:]))


class _Plan(NamedTuple):
    """A plan for the autograd node: operators, and operations that are compiled."""

    communicator: Communicator
    weighting: Weighting
    needs_gradient: bool

    def forward(self, args: NormArgs) -> tuple[Tensor, PackedStatistics]:
        summed = args._replace(residual=None)  # the operator would need the residual in memory
        sharing = args.x.shape[1], id(self.communicator), self.weighting, self.needs_gradient
        coefficients, numbers = _once(torch.ops.multibn.forward_sums, *_spread(summed), *sharing)
        y = reference.finish(args, coefficients.unbind())
        return y, _statistics(coefficients, numbers)

    def backward(self, g: Gradient) -> tuple[Tensor | None, ...]:
        if g.y is not None:
            dy = reference.rectified(g.dy, g.y)
            g = g._replace(dy=dy, input=g.input._replace(relu=False), y=None)
        args = g.input
        _compare_again()
        dweight, dbias, *coefficients = torch.ops.multibn.backward_sums(
            g.dy, *_spread(args), g.batch.numbers, g.needs_dx, id(self.communicator)
        )
        dx = reference.finish_gradient(g, coefficients[0].unbind()) if g.needs_dx else None
        dparameters = None if args.weight is None else dweight, None if args.bias is None else dbias
        return dx, None, *dparameters


def _once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator that runs in the forward pass only, once the graph is in two.

    torch marks all operations of a checkpoint to be repeated in the backward pass, and cannot
    repeat effects.
    """
    before = len(_nodes())
    results = function(*arguments)
    for node in list(_nodes())[before:]:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return results


def _compare_again() -> None:
    """Let the ReLUs since the message before compare in the backward pass, on a CPU.

    The compiler would compare in the forward pass, and keep Booleans in the place of numbers, which
    inductor's code for a CPU writes and reads one by one.
    """
    for node in reversed(_nodes()):
        if "multibn" in str(node.args[1:2]):  # the message
            return
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.bool and value.is_cpu:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _nodes() -> Any:
    """The operations that the compiler has written down so far."""
    mode: Any = get_proxy_mode()
    return () if mode is None else mode.tracer.graph.nodes


@operator(
    "update_running(Tensor(a!) running_mean, Tensor(b!) running_var, float? momentum, "
    "str convention, Tensor(c!)? num_batches, Tensor mean, Tensor var, Tensor count, "
    "Tensor local_count) -> ()"
)
def _update_running(*arguments: Any) -> None:
    steps.update_running(Running(*arguments[:5]), *arguments[5:])
