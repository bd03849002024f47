"""A layer's passes as torch.compile sees them: torch's operations, around an operator per message.

The compiler makes code of the passes, and fuses them with the operations around the layer. It calls
the operator `multibn::allreduce` without looking inside, in the order of the layers. Meta and fake
tensors take the same way. An operator takes only tensors, numbers and strings, so a communicator is
passed as its id.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from multibn import masks, recompute, statistics, step
from multibn._arrays import is_abstract, is_on_host
from multibn._typing import RunningVar, Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import during, raise_for_nan_gradients
from multibn.kernels import RIGHT, Running, generic
from multibn.population import Pool
from multibn.statistics import BatchStatistics
from multibn.step import Input
from multibn.torch_backend import _differentiable, functional
from multibn.torch_backend._input import without_autocast

# Weak: a communicator ends with its layer, and so does the graph compiled for the layer.
_communicators: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


def register(communicator: Communicator, /) -> None:
    """Let the operator find a communicator by its id."""
    _communicators[id(communicator)] = communicator


def takes(x: Any, /) -> bool:
    """Whether `forward` is to take `x`: in compiled code, and without data."""
    if torch.compiler.is_compiling():
        return True
    return isinstance(x, FakeTensor) or getattr(x, "is_meta", False)


def forward(
    input: Input, num_channels: int, communicator: Communicator, /, *, weighting: Weighting
) -> tuple[Tensor, BatchStatistics, Any]:
    """`functional.forward_all` of one input, for compiled code and without data.

    Under torch.func and in forward mode the pass runs without compilation. The third result is this
    rank's elements per channel.

    Raises
    ------
    RuntimeError
        In torch.export: the program would hold the communicator of this process.
    """
    compiling = torch.compiler.is_compiling()
    # Not is_exporting(): the compiler of torch 2.11 takes that for true in torch.compile as well.
    if compiling and getattr(torch.compiler, "_is_exporting_flag", False):
        raise RuntimeError(
            "torch.export cannot export layers that share statistics in training: the program "
            "would need the processes of this run. Call model.eval() first, or export a copy of "
            "the model after revert_sync_batchnorm."
        )
    # Not by `takes`: where this frame is not compiled, the compiler may yet take that one.
    without_data = isinstance(input.x, FakeTensor) or getattr(input.x, "is_meta", False)
    if _differentiable.is_needed() if compiling else not without_data:
        results = functional.forward_all([input], [num_channels], communicator, weighting=weighting)
        return *results[0], step.local_count(functional.complete(input))
    if not compiling:
        functional.check_input(input.x, num_channels)
    x, weight, bias, eps, axis, residual, relu, _, asked = input
    axis = axis or statistics.reduced_axes(x.ndim)
    mask = asked if asked is None else mask_of(x, asked, num_channels, communicator, axis)
    options = eps, axis, relu, id(communicator), weighting
    forward = torch.ops.multibn.forward
    y, *batch = forward(x, weight, bias, residual, mask, num_channels, *options)
    if mask is None:
        return y, BatchStatistics(*batch), x.numel() // max(batch[0].numel(), 1)
    return y, BatchStatistics(*batch), mask.sum().to(batch[0])


def mask_of(
    x: Tensor,
    asked: masks.Asked | None,
    num_channels: int,
    communicator: Communicator,
    axis: tuple[int, ...] = (),
) -> Tensor | None:
    """The engine's mask for `x`, by `masks.checked`; one operator in compiled code."""
    axis = axis or statistics.reduced_axes(x.ndim)
    if asked is None or not torch.compiler.is_compiling():
        return None if asked is None else masks.checked(x, asked, axis=axis)
    mask: Tensor = torch.ops.multibn.mask(x, *asked, num_channels, axis, id(communicator))
    return mask


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    num_channels: int,
    eps: float,
    axis: Sequence[int],
    relu: bool,
    communicator: int,
    weighting: Weighting,
) -> tuple[Tensor, ...]:
    axis = tuple(axis)
    i = Input(x, weight, bias, eps, axis, residual, relu, mask=mask)
    if not is_abstract(x):  # torch.compile(backend="eager")
        return _run(i, num_channels, communicator, weighting)
    try:
        functional.check_input(x, num_channels)
        if not x.is_meta:
            functional.check_options(i)
    except (TypeError, ValueError):  # which all ranks are to learn when the code runs
        refuse = torch.ops.multibn.refuse
        with torch.no_grad():
            return refuse(x, weight, bias, residual, num_channels, axis, communicator)
    return _SyncBatchNorm.apply(*i[:7], mask, communicator, weighting)


def _run(
    i: Input, num_channels: int, communicator: int, weighting: Weighting
) -> tuple[Tensor, ...]:
    """The pass without compilation."""
    ((y, batch),) = functional.forward_all(
        [i], [num_channels], _communicators[communicator], weighting=weighting
    )
    return y, *(_uncounted(batch) if recompute.in_recomputing() else batch)


def _uncounted(batch: BatchStatistics) -> BatchStatistics:
    """With a count of 0, by which running statistics do not move."""
    return batch._replace(count=torch.zeros_like(batch.count))


class _SyncBatchNorm(torch.autograd.Function):
    """The autograd node, as `_autograd` has one, made of operations that are compiled."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        axis: tuple[int, ...],
        residual: Tensor | None,
        relu: bool,
        mask: Tensor | None,
        communicator: int,
        weighting: Weighting,
    ) -> tuple[Tensor, ...]:
        ctx.about = x.shape, axis, mask is not None, x.dtype, communicator
        ctx.options = {"eps": eps, "axis": axis, "relu": relu}
        count: Any = generic.num_elements(x, axis)
        with without_autocast(x):
            if mask is None:
                rank_weight: Any = statistics.rank_weight(count, x.shape[axis[0]], weighting)
                payload = generic.pack(*_moments(x, axis), rank_weight, count)
            else:
                rank_weight, count = masks.share(mask, weighting, axis=axis)
                payload = generic.begin_forward(x, rank_weight, count, axis=axis, mask=mask)
            with _marked(CheckpointPolicy.MUST_SAVE):
                summed = torch.ops.multibn.allreduce(payload, "forward", *ctx.about)
            options: Any = {"eps": eps, "axis": axis, "residual": residual, "mask": mask}
            y, *batch, _ = generic.finish_forward(
                summed, x, weight, bias, rank_weight, count, **options
            )
            y = y.relu() if relu else y  # a comparison would be a Boolean array on CPU
        has_residual = relu and residual is not None
        ctx.save_for_backward(x, weight, bias, mask, y if has_residual else None, *batch)
        ctx.mark_non_differentiable(*batch)
        return y, *batch

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mask, y, mean, var, _, element_weight = ctx.saved_tensors
        dy, *_ = grad_outputs
        about = dy, x, mean, var, weight, bias
        options = {**ctx.options, "y": y, "mask": mask}
        dx = dresidual = None
        here = CheckpointPolicy.PREFER_RECOMPUTE
        with without_autocast(x):
            with _marked(here):
                payload, dweight, dbias = generic.begin_backward(*about, **options)
            if ctx.needs_input_grad[0]:
                summed = torch.ops.multibn.allreduce(payload, "backward", *ctx.about)
                with _marked(here):
                    dx, dresidual = generic.finish_backward(
                        summed, *about, element_weight, **options
                    )
            elif y is not None:
                dresidual = generic.rectified(dy, y)
        if dresidual is None and ctx.needs_input_grad[5]:
            dresidual = generic.masked(dy, mask)
        return dx, dweight, dbias, None, None, dresidual, *[None] * 4


@contextmanager
def _marked(policy: CheckpointPolicy) -> Iterator[None]:
    """Context whose operations run in the pass that `policy` says, once the graph is in two.

    With MUST_SAVE in the forward pass only: torch marks all operations of a checkpoint to be
    repeated in the backward pass, and cannot repeat effects. With PREFER_RECOMPUTE in the backward
    pass: the compiler would otherwise take a comparison for a ReLU into the forward pass, and write
    the Boolean result, element by element.
    """
    mode: Any = get_proxy_mode()
    before = 0 if mode is None else len(mode.tracer.graph.nodes)
    yield
    if mode is not None:
        nodes = mode.tracer.graph.nodes
        for node in islice(reversed(nodes), len(nodes) - before):
            node.meta["recompute"] = policy


def _moments(x: Tensor, axis: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and mean of squares in one pass, about the element in the middle of each channel.

    `generic.local_moments` reads `x` twice. Here all sums are float64, of which compiled code makes
    no array. An element 1,000 standard deviations away costs 6 of the 16 digits.
    """
    count = generic.num_elements(x, axis)
    if count == 0:
        zeros = x.new_zeros(statistics.channels(x, axis), dtype=torch.float64)
        return zeros, zeros
    middle = x
    for i in sorted(axis, reverse=True):
        middle = middle.select(i, x.shape[i] // 2)
    shape = [1 if i in axis else n for i, n in enumerate(x.shape)]
    d = x.to(generic.arithmetic_dtype(torch, x.dtype)).double() - middle.double().reshape(shape)
    first, second = d.sum(axis) / count, (d * d).sum(axis) / count
    mean = middle + first
    return mean, second - first * first + mean * mean


_library = torch.library.Library("multibn", "DEF")
_library.define(
    "allreduce(Tensor payload, str phase, SymInt[] shape, int[] axis, bool masked, "
    "ScalarType dtype, int communicator) -> Tensor"
)
_library.define(
    "mask(Tensor x, Tensor? mask, Tensor? lengths, int num_channels, int[] axis, "
    "int communicator) -> Tensor"
)
_library.define(
    "refuse(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, int num_channels, "
    "int[] axis, int communicator) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _allreduce(
    payload: Tensor,
    phase: str,
    shape: Sequence[int],
    axis: Sequence[int],
    masked: bool,
    dtype: torch.dtype,
    communicator: int,
) -> Tensor:
    """The sum of a message over the ranks, which is new memory. Collective."""
    conversation = _communicators[communicator]
    over = during(conversation, phase, dtype)
    if phase == "backward":
        if torch.is_anomaly_enabled():
            raise_for_nan_gradients(over, bool(payload.isnan().any()))
        return over.allreduce(payload)
    functional.refuse_ddp_join(conversation)
    channels, count, *_ = statistics.sizes(tuple(shape), tuple(axis))
    count = payload[-1].item() if masked and is_on_host(payload) else count
    batches = recompute.replayed([channels])
    if batches is not None:
        return _sum_again(batches[0], payload)
    summed = over.allreduce(payload)
    state = generic.state(summed, count)
    if state != RIGHT:
        statistics.raise_for(state, over, payload, torch.empty(tuple(shape), device="meta"))
    if masked and is_on_host(summed):
        step.require_element(summed[-1], shape, over)
    if recompute.state.stack:
        *batch, _ = generic.unpack(summed, channels, payload[-2], payload[-1])
        recompute.record([_Sum.made(summed, batch)])
    return summed


class _Sum(BatchStatistics):
    """Statistics on a tape of `recompute`, with the sum of payloads that they come from."""

    summed: Tensor

    @classmethod
    def made(cls, summed: Tensor, batch: Sequence[Tensor]) -> "_Sum":
        entry = cls(*batch)
        entry.summed = summed
        return entry


def _sum_again(batch: BatchStatistics, payload: Tensor) -> Tensor:
    """The sum that statistics come from, but for the count: 0 keeps running statistics in place."""
    if isinstance(batch, _Sum):
        summed = batch.summed.clone()
    else:  # from a layer that ran without compilation
        mean, var, _, element_weight = batch
        rank_weight, count = payload[-2:]
        total = rank_weight / (generic.at_least_one(count) * element_weight)
        total = torch.where(rank_weight == 0, 1.0, total)
        summed = generic.pack(mean.flatten(), (var + mean * mean).flatten(), 1.0, 0.0) * total
    summed[-1] = 0.0
    return summed


def _refuse(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_channels: int,
    axis: Sequence[int],
    communicator: int,
) -> tuple[Tensor, ...]:
    """Raise for an input that does not fit, on all ranks. Collective."""
    i = Input(x, weight, bias, 1.0, tuple(axis), residual)
    return _run(i, num_channels, communicator, "element")


def _mask(
    x: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    num_channels: int,
    axis: Sequence[int],
    communicator: int,
) -> Tensor:
    """The engine's mask, see `masks.checked`; raises on all ranks if the mask does not fit."""
    try:
        functional.check_input(x, num_channels)
        checked = masks.checked(x, masks.Asked(mask, lengths), axis=tuple(axis))
    except (TypeError, ValueError) as error:
        functional.refuse(error, [x], [num_channels], _communicators[communicator])
    assert checked is not None
    return checked.clone()  # an operator's output must not share memory with its inputs


_library.impl("mask", _mask, "CompositeExplicitAutograd")
_library.impl("allreduce", _allreduce, "CompositeExplicitAutograd")
_library.impl("refuse", _refuse, "CompositeExplicitAutograd")


@torch.library.register_fake("multibn::allreduce", lib=_library)
def _(payload: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(payload)


@torch.library.register_fake("multibn::mask", lib=_library)
def _(x: Tensor, *others: Any) -> Tensor:
    *_, axis, _ = others
    return x.new_empty([n if i in axis else 1 for i, n in enumerate(x.shape)], dtype=torch.bool)


@torch.library.register_fake("multibn::refuse", lib=_library)
def _(x: Tensor, weight: Any, bias: Any, residual: Any, num_channels: int, *_: Any) -> Any:
    batch = [x.new_empty(shape, dtype=torch.float64) for shape in ([num_channels],) * 2 + ([],) * 2]
    return torch.empty_like(x), *batch


# The compiler keeps effects in order, and neither drops nor repeats one.
for _name in ("mask", "allreduce", "refuse"):
    _register_effectful_op(getattr(torch.ops.multibn, _name).default, _EffectType.ORDERED)


def move(running: Running | Pool, batch: BatchStatistics, local_count: int | Tensor, /) -> None:
    """`functional.move` in compiled code and without data."""
    if isinstance(running, Pool):
        running.add(batch, local_count=local_count)
    else:
        counted = (None, local_count) if isinstance(local_count, Tensor) else (local_count, None)
        torch.ops.multibn.move(*running, *batch[:3], *counted)


def _move(
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float | None,
    convention: RunningVar,
    num_batches: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    local_count: int | None,
    local_tensor: Tensor | None,
) -> None:
    running = Running(running_mean, running_var, momentum, convention, num_batches)
    generic.move(running, mean, var, count, local_tensor if local_count is None else local_count)


_library.define(
    "forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mask, "
    "int num_channels, float eps, int[] axis, bool relu, int communicator, str weighting) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "move(Tensor(a!) running_mean, Tensor(b!) running_var, float? momentum, str convention, "
    "Tensor(c!)? num_batches, Tensor mean, Tensor var, Tensor count, SymInt? local_count, "
    "Tensor? local_tensor) -> ()"
)
# Dynamo writes the calls down; what comes after Dynamo sees the operations inside.
_library.impl("forward", _forward, "CompositeImplicitAutograd")
_library.impl("move", _move, "CompositeImplicitAutograd")
