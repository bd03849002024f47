"""Layers under torch.compile: operators for reductions, compiled code for elementwise operations.

The operators run the eager kernels. The compiler fuses `(x - centre) * scale + shift`, and the
formula of the gradient, with the operations around the layer, for meta and fake tensors, too. In
the call tree, C is the number of channels::

    functional.normalize_with_batch_stats         traced by Dynamo
      multibn::forward         traced by AOTAutograd, which sees the operations inside
        SyncBatchNormFunction
          _Traced.forward      multibn::forward_sums: 3C coefficients, 2C+2 statistics (float64)
          _Traced.backward     multibn::backward_sums: 4C coefficients, gradients of parameters

An operator finds its plan by its argument `text`, which is also part of graphs in torch's cache on
disk. The compiler guards all its values. tests/torch_backend/test_compiled_guard.py lists the
conditions that no graph can guard: they are checked when an operator runs.
"""

import zlib
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import array_api_compat.torch  # noqa: F401  (traced code uses it and cannot import it)
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from multibn._typing import Weighting
from multibn._version import __version__
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import LayerCommunicator
from multibn.engine import recompute
from multibn.engine.plan import Gradient, NormArgs, Plan
from multibn.kernels import Running, reference, select, steps
from multibn.kernels.layout import channels
from multibn.kernels.spec import OPTIONS, PackedStatistics, options_of, unpack
from multibn.torch_backend._torch_private import FakeTensor, call_context, captures_cuda_graphs
from multibn.torch_backend.layer import autograd, validation

# By `operator_name`. Weak, so that a communicator ends with its layer.
_layers: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
_ids = count()


@cache
def _code_version() -> str:
    """Return a hash of this code, so that torch's cache finds no graphs of other versions."""
    sources = __file__, *(str(module.__file__) for module in (autograd, reference, steps))
    with suppress(OSError):
        return f"{zlib.crc32(b''.join(Path(source).read_bytes() for source in sources)):x}"
    return __version__


def register(communicator: Any, /) -> None:
    """Set `communicator.operator_name`, by which operators find the communicator."""
    communicator.operator_name = f"{_code_version()}.{next(_ids)}"
    _layers[communicator.operator_name] = communicator


def is_compiling_or_fake(x: Any, /) -> bool:
    """Return whether custom operators must handle `x`: compiled code, meta and fake tensors."""
    is_fake = isinstance(x, FakeTensor) or getattr(x, "is_meta", False)
    return is_fake or torch.compiler.is_compiling()


_LIBRARY = torch.library.Library("multibn", "DEF")
_SCHEMA_TYPES: Any = {float: "float", bool: "bool", tuple[int, ...]: "int[]"}
_OPTIONS = ", ".join(f"{_SCHEMA_TYPES[NormArgs.__annotations__[name]]} {name}" for name in OPTIONS)


def operator(
    schema: str, fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an operator in the namespace `multibn`.

    The compiler traces into an operator without `fake`, which returns outputs of the right shapes
    and dtypes. An operator with `fake` is neither removed nor repeated, nor put in a CUDA graph.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        # Without flexible_layout, inductor would copy inputs into the strides of the trace.
        tags = torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout
        _LIBRARY.define(schema, tags=() if fake is None else tags)
        kind = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
        _LIBRARY.impl(name, function, kind)
        if fake is not None:
            torch.library.register_fake(f"multibn::{name}", fake, lib=_LIBRARY)
            has_side_effect(getattr(torch.ops.multibn, name).default)
        return function

    return define


def _call(function: Callable[..., Any], *arguments: Any, runs_again: bool = True) -> Any:
    """Call a communicating operator, with a result of the previous one as its last argument.

    This dependency keeps the collectives in the order of the trace in every rank's graph. With
    `runs_again=False`, the backward graph never recomputes the operator, even in a checkpoint.
    """
    mode: Any = get_proxy_mode()
    if mode is None:
        return function(*arguments, None)
    nodes = mode.tracer.graph.nodes
    first = len(nodes)
    results = function(*arguments, getattr(mode.tracer, "multibn_latest", None))
    mode.tracer.multibn_latest = results[-1] if isinstance(results, tuple | list) else results
    for node in () if runs_again else list(nodes)[first:]:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.meta["partitioner_tag"] = "must_be_in_forward"
    return results


class _Step:
    """The parsed `text` of an operator, and the plan that it used last."""

    def __init__(self, text: str) -> None:
        (
            self.layer, self.num_channels, self.weighting, self.convention, self.axis, self.options,
            self.needs_gradient, self.copied, self.error, _, sizes,
        ) = literal_eval(text)  # fmt: skip
        self._text, self._has_sizes = text, bool(sizes)  # without sizes, shapes are dynamic
        self._plan: Any = type(None)
        self._context: object = None

    def plan(self, args: NormArgs, *, backward: bool = False) -> Plan:
        """Return the layer's plan for `args`; in the forward pass, validate `args` first."""
        plan: Plan | None = self._plan()
        context = self._context if backward else call_context()
        if plan is not None and context == self._context:
            return plan
        x, communicator, self._context = args.x, _layers[self.layer], context
        key = self._text, context, *(() if self._has_sizes else (x.shape, x.stride()))
        plan = getattr(communicator, "plans", {}).get(key)
        if plan is None:
            with torch.no_grad():
                if self.error is not None:  # found when the graph was traced
                    error = (TypeError, ValueError)[self.error[0]](self.error[1])
                    validation.raise_on_all_ranks(error, x, self.num_channels, communicator)
                if not backward:
                    validation.validate_call(args, self.num_channels, communicator)
                plan = Plan(
                    args, communicator, weighting=self.weighting, verbs=_coefficient_kernels(x),
                    needs_gradient=self.needs_gradient, copied=self.copied,
                )  # fmt: skip
            if isinstance(communicator, LayerCommunicator):
                communicator.cache_plan(key, plan)
        if self._has_sizes:
            self._plan = ref(plan)
        return plan


_step: Any = lru_cache(maxsize=4096)(_Step)
_new: Any = tuple.__new__  # makes a named tuple without a Python frame


def _coefficient_kernels(x: Tensor) -> Any:
    """Return the kernels for `x`, set to return coefficients instead of writing outputs."""
    verbs = vars(select(x))
    names = {"PreparedStep", "finish_forward", "normalize", "finish_backward"} & verbs.keys()
    return SimpleNamespace(**verbs | {k: partial(verbs[k], coefficients=True) for k in names})


def _coefficients_like(x: Tensor, text: str, count: int) -> Tensor:
    # The operator itself will reject integers and wrong numbers of channels.
    dtype = reference.arithmetic_dtype(torch, x.dtype) if x.is_floating_point() else torch.float64
    shape = (*x.shape[:1], _step(text).num_channels, *x.shape[2:])
    return x.new_empty((count, *channels(shape, _step(text).axis)), dtype=dtype)


def _forward_sums_like(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    coefficients = _coefficients_like(x, arguments[-2], 3)
    size = 2 * (coefficients.numel() // 3) + 2
    return coefficients, x.new_empty(size, dtype=torch.float64)


@operator(
    "forward_sums(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, float? momentum, Tensor(c!)? num_batches, "
    "str text, Tensor? after) -> (Tensor, Tensor)",
    _forward_sums_like,
)
def _forward_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the coefficients of the output, and the packed statistics. Collective."""
    x, weight, bias, mask, mean, var, momentum, num_batches, text, _ = arguments
    step, running = _step(text), None
    if mean is not None:
        running = _new(Running, (mean, var, momentum, step.convention, num_batches))
    args = _new(NormArgs, (x, weight, bias, *step.options, mask, None, running))
    args = autograd.with_kernel_layout(args)
    coefficients, batch = step.plan(args).forward(args)
    if recompute.state.stack and recompute.in_recomputing():
        batch.numbers[-2] = 0.0  # the count, so that no running statistics are updated
    return coefficients, batch.numbers


def _backward_sums_like(dy: Tensor, x: Tensor, weight: Any, bias: Any, *others: Any) -> Any:
    gradients = [x.new_empty(0) if p is None else torch.empty_like(p) for p in (weight, bias)]
    needs_dx, text = others[-3:-1]
    coefficients = _coefficients_like(x, text, 4) if needs_dx else x.new_empty(0)
    return *gradients, coefficients


@operator(
    "backward_sums(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor? y, "
    "Tensor numbers, bool needs_dx, str text, Tensor? after)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_sums_like,
)
def _backward_sums(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return dweight, dbias and the coefficients of dx. Collective."""
    dy, x, weight, bias, mask, y, numbers, needs_dx, text, _ = arguments
    step = _step(text)
    args = _new(NormArgs, (x, weight, bias, *step.options, mask, None, None))
    args = autograd.with_kernel_layout(args)
    plan = step.plan(args, backward=True)
    g = _new(Gradient, (dy, args, _new(PackedStatistics, (numbers, plan.channels)), y, needs_dx))
    if torch.is_anomaly_enabled():
        autograd.raise_for_nan_gradient(g, plan.communicator)
    dx, _, dweight, dbias = plan.backward(g)
    if dx is None or dweight is None or dbias is None:
        dx, dweight, dbias = (x.new_empty(0) if v is None else v for v in (dx, dweight, dbias))
    return dweight, dbias, dx


@operator(
    "checked_mask(Tensor x, Tensor? mask, Tensor? lengths, SymInt num_channels, str layer, "
    "Tensor? after) -> Tensor",
    lambda x, *_: x.new_empty((x.shape[0], 1, *x.shape[2:]), dtype=torch.bool),
)
def _checked_mask(*arguments: Any) -> Tensor:
    """Return the engine's mask. Collective if it raises."""
    x, mask, lengths, num_channels, layer, _ = arguments
    checked: Any = validation.mask_of(x, mask, lengths, num_channels, _layers[layer])
    # An operator's output must be new memory, with the strides of its fake.
    return checked.clone(memory_format=torch.contiguous_format)


# `mask` and `forward` are nodes in Dynamo's graph; AOTAutograd traces into them.
@operator("mask(Tensor x, Tensor? mask, Tensor? lengths, SymInt num_channels, str layer) -> Tensor")
def _mask(*arguments: Any) -> Any:
    return _call(torch.ops.multibn.checked_mask, *arguments, runs_again=False)


@operator(
    "forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor? residual, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, float? momentum, str? convention, "
    f"Tensor(c!)? num_batches, SymInt num_channels, str layer, str weighting, {_OPTIONS})"
    " -> Tensor[]"
)
def _forward(*arguments: Any) -> list[Tensor]:
    """Return the output and the fields of `BatchStatistics`. Collective."""
    x, weight, bias, mask, residual, *buffers = arguments[:10]
    num_channels, layer, weighting, *options = arguments[10:]
    running = None if buffers[0] is None else Running(*buffers)
    options = [tuple(v) if isinstance(v, list) else v for v in options]
    args: Any = _new(NormArgs, (x, weight, bias, *options, mask, residual, running))
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    tensors = [v for v in (x, weight, bias, mask, *buffers[:2]) if v is not None]
    kinds = [(str(v.dtype), str(v.device)) for v in tensors]
    sizes = [n for v in tensors for n in v.shape]
    is_fixed = x.is_cpu and all(type(n) is int for n in sizes)  # inductor chooses strides on a GPU
    error = None
    try:
        validation.check_input(x, num_channels)
        validation.check_options(args)
    except (TypeError, ValueError) as caught:  # raised on all ranks when the operator runs
        error = isinstance(caught, ValueError), str(caught)
        args = args._replace(eps=1.0)  # literal_eval reads no inf
    text = repr((
        layer, int(num_channels), weighting, buffers[3], args.axis, options_of(args), needs_grad,
        captures_cuda_graphs(), error, kinds, sizes if is_fixed else (),
    ))  # fmt: skip
    plan = _Traced(text, options_of(args), weighting, _layers[layer])
    if error is None:
        y, batch = autograd.apply((plan, args), x, weight, bias, residual)
    else:
        with torch.no_grad():
            y, batch = torch.empty_like(x), plan.forward_sums(args)[1]
    return [y, *unpack(batch)]


class _Traced(NamedTuple):
    """The plan of the autograd node in compiled code: operators, and operations to compile."""

    text: str
    options: tuple[Any, ...]
    weighting: Weighting
    communicator: Communicator

    def forward_sums(self, args: NormArgs) -> tuple[Tensor, PackedStatistics]:
        """Return the coefficients of the output and the statistics."""
        mean, var, momentum, _, num_batches = args.running or (None,) * 5
        arguments = args.x, args.weight, args.bias, args.mask, mean, var, momentum, num_batches
        function = torch.ops.multibn.forward_sums
        coefficients, numbers = _call(function, *arguments, self.text, runs_again=False)
        return coefficients, PackedStatistics(numbers, tuple(coefficients.shape[1:]))

    def forward(self, args: NormArgs) -> tuple[Tensor, PackedStatistics]:
        coefficients, batch = self.forward_sums(args)
        return reference.finish(args, coefficients.unbind()), batch

    def backward(self, g: Gradient) -> tuple[Tensor | None, ...]:
        args, bias = g.input, g.input.bias
        if bias is not None and args.weight is not None and bias.dtype == args.weight.dtype:
            bias = args.weight  # only dtype and shape matter, so `bias` need not be saved
        _recompute_relu_masks()
        tensors = g.dy, args.x, args.weight, bias, args.mask, g.y, g.batch.numbers
        function = torch.ops.multibn.backward_sums
        dweight, dbias, coefficients = _call(function, *tensors, g.needs_dx, self.text)
        dx = None
        if g.needs_dx:
            dy = g.dy if g.y is None else reference.rectified(g.dy, g.y)
            g = g._replace(dy=dy, input=args._replace(relu=False))
            dx = reference.finish_gradient(g, coefficients.unbind())
        return dx, None, None if args.weight is None else dweight, None if bias is None else dbias


def _recompute_relu_masks() -> None:
    """Mark bool tensors since the last collective for recomputation in the backward graph, on CPU.

    The compiler would save the masks of ReLUs, and inductor's CPU code accesses bools one by one.
    """
    mode: Any = get_proxy_mode()
    for node in reversed(() if mode is None else mode.tracer.graph.nodes):
        if "multibn" in str(node.args[:1]) + str(node.target):  # the last collective
            return
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.bool and value.is_cpu:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


@operator(  # called at the end of `step_statistics`
    "update_running(Tensor(a!) running_mean, Tensor(b!) running_var, float? momentum, "
    "str convention, Tensor(c!)? num_batches, Tensor mean, Tensor var, Tensor count, "
    "Tensor local_count) -> ()"
)
def _update_running(*arguments: Any) -> None:
    steps.update_running(Running(*arguments[:5]), *arguments[5:])
