"""Operators of a layer that torch.compile calls without looking inside: message, mask, refusal.

An operator takes only tensors, numbers and strings, so a communicator is passed as its id.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from multibn import masks, recompute, statistics, step
from multibn._arrays import is_on_host
from multibn._typing import Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import during, raise_for_nan_gradients
from multibn.kernels import RIGHT, generic
from multibn.statistics import BatchStatistics
from multibn.step import Input
from multibn.torch_backend import functional

# Weak: a communicator ends with its layer, and so does the graph compiled for the layer.
_communicators: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


def register(communicator: Communicator, /) -> None:
    """Let the operator find a communicator by its id."""
    _communicators[id(communicator)] = communicator


def run(i: Input, num_channels: int, communicator: int, weighting: Weighting) -> tuple[Tensor, ...]:
    """The pass without compilation."""
    ((y, batch),) = functional.forward_all(
        [i], [num_channels], _communicators[communicator], weighting=weighting
    )
    return y, *(_uncounted(batch) if recompute.in_recomputing() else batch)


def _uncounted(batch: BatchStatistics) -> BatchStatistics:
    """With a count of 0, by which running statistics do not move."""
    return batch._replace(count=torch.zeros_like(batch.count))


library = torch.library.Library("multibn", "DEF")
library.define(
    "allreduce(Tensor payload, str phase, SymInt[] shape, int[] axis, bool masked, "
    "ScalarType dtype, int communicator) -> Tensor"
)
library.define(
    "mask(Tensor x, Tensor? mask, Tensor? lengths, int num_channels, int[] axis, "
    "int communicator) -> Tensor"
)
library.define(
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
    return run(i, num_channels, communicator, "element")


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


library.impl("mask", _mask, "CompositeExplicitAutograd")
library.impl("allreduce", _allreduce, "CompositeExplicitAutograd")
library.impl("refuse", _refuse, "CompositeExplicitAutograd")


@torch.library.register_fake("multibn::allreduce", lib=library)
def _(payload: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(payload)


@torch.library.register_fake("multibn::mask", lib=library)
def _(x: Tensor, *others: Any) -> Tensor:
    *_, axis, _ = others
    return x.new_empty([n if i in axis else 1 for i, n in enumerate(x.shape)], dtype=torch.bool)


@torch.library.register_fake("multibn::refuse", lib=library)
def _(x: Tensor, weight: Any, bias: Any, residual: Any, num_channels: int, *_: Any) -> Any:
    batch = [x.new_empty(shape, dtype=torch.float64) for shape in ([num_channels],) * 2 + ([],) * 2]
    return torch.empty_like(x), *batch


# The compiler keeps effects in order, and neither drops nor repeats one.
for _name in ("mask", "allreduce", "refuse"):
    _register_effectful_op(getattr(torch.ops.multibn, _name).default, _EffectType.ORDERED)
