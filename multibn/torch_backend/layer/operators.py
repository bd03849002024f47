"""Operators of a layer that torch.compile calls without looking inside, such as the message.

An operator takes only tensors, numbers and strings, so a communicator is passed as its id.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from multibn._arrays import is_on_host
from multibn.communicators import Communicator
from multibn.communicators.conversation import during, raise_for_nan_gradients
from multibn.engine import recompute, statistics, step
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Input
from multibn.kernels import RIGHT, generic
from multibn.torch_backend.layer import functional

# Weak: a communicator ends with its layer, and so does the graph compiled for the layer.
_communicators: WeakValueDictionary[int, Communicator] = WeakValueDictionary()

# The output, and the numbers of `BatchStatistics`.
Results: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def register(communicator: Communicator, /) -> None:
    """Let the operator find a communicator by its id."""
    _communicators[id(communicator)] = communicator


def run(i: Input, num_channels: int, communicator: int, weighting: Any) -> Results:
    """The pass without compilation."""
    ((y, batch),) = functional.forward_all(
        [i], [num_channels], _communicators[communicator], weighting=weighting
    )
    if recompute.in_recomputing():  # with a count of 0, running statistics do not move
        batch = batch._replace(count=torch.zeros_like(batch.count))
    return y, *batch


library = torch.library.Library("multibn", "DEF")


def operator(
    key: str = "CompositeExplicitAutograd", *, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function `_name` the operator `multibn::name`; the annotations are the schema.

    torch's dispatcher calls the function by `key`. The operator writes to the arguments `mutates`.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.removeprefix("_")
        library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        library.impl(name, function, key)
        return function

    return define


@operator()
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
        batch, _ = generic.unpack(summed, channels, payload[-2], payload[-1])
        entry = _Sum(*batch)
        entry.summed = summed
        recompute.record([entry])
    return summed


class _Sum(BatchStatistics):
    """Statistics on a tape of `recompute`, with the sum of payloads that they come from."""

    summed: Tensor


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


@operator()
def _refuse(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_channels: int,
    axis: Sequence[int],
    communicator: int,
) -> Results:
    """Raise for an input that does not fit, on all ranks. Collective."""
    i = Input(x, weight, bias, 1.0, tuple(axis), residual)
    return run(i, num_channels, communicator, "element")


@operator()
def _mask(
    x: Tensor, mask: Tensor | None, lengths: Tensor | None, num_channels: int, communicator: int
) -> Tensor:
    """The engine's mask. Collective if it raises."""
    checked = functional.mask_of(x, mask, lengths, [num_channels], _communicators[communicator])
    assert checked is not None
    # New memory, as an operator's output must be, with the strides that the compiler is told.
    return checked.clone(memory_format=torch.contiguous_format)


@operator()
def _total_statistics(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all splits of a batch, axis 0, by the law of total variance."""
    between, mean = torch.var_mean(generic.as_wide(means), 0, correction=0)
    return mean.to(means), (generic.as_wide(variances).mean(0) + between).to(variances)


@torch.library.register_fake("multibn::allreduce", lib=library)
def _(payload: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(payload)


@torch.library.register_fake("multibn::mask", lib=library)
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty([1 if i == 1 else n for i, n in enumerate(x.shape)], dtype=torch.bool)


@torch.library.register_fake("multibn::refuse", lib=library)
def _(x: Tensor, weight: Any, bias: Any, residual: Any, num_channels: int, *_: Any) -> Any:
    batch = [x.new_empty(shape, dtype=torch.float64) for shape in ([num_channels],) * 2 + ([],) * 2]
    return torch.empty_like(x), *batch


@torch.library.register_fake("multibn::total_statistics", lib=library)
def _(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(means[0]), torch.empty_like(variances[0])


# The compiler keeps effects in order, and neither drops nor repeats one.
for _name in ("mask", "allreduce", "refuse"):
    _register_effectful_op(getattr(torch.ops.multibn, _name).default, _EffectType.ORDERED)
