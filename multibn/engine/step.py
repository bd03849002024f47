"""A training step of layers: two halves each way, with one message between them.

The functions of `engine.statistics` are for people; the layers of both frameworks run here, by the
verbs of `multibn.kernels`.
"""

from typing import Any, TypeAlias

import numpy as np

from multibn import kernels, wire
from multibn._arrays import is_on_host, values
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import LayerCommunicator, LayerPhase
from multibn.engine import masks, recompute, statistics
from multibn.engine.running import StepAccumulator
from multibn.kernels import BatchStatistics, Running, reference
from multibn.kernels import Gradient as Gradient
from multibn.kernels import NormArgs as NormArgs
from multibn.kernels.spec import CANCELLED, OK

# Of x; of the residual, or None, see `reference.residual_gradient`; of weight and bias.
Gradients: TypeAlias = tuple[Array | None, Array | None, Array | None, Array | None]


def forward(
    args: NormArgs,
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
    verbs: Any = None,
    needs_gradient: bool = True,
) -> tuple[Any, BatchStatistics]:
    """Normalize an input by the batch that all ranks hold together.

    `verbs` are the kernels, in place of those that `kernels.select` chooses; what they make of the
    input is returned. `needs_gradient` says whether a `backward` may follow, and is compared.

    Collective, one allreduce of 2C+4 float64 numbers, unless `engine.recompute` replays the
    statistics; another one for a variance that is lost beside the square of the mean, on the host.
    Raises as `statistics.aggregate`, and OneValueError, a ValueError, on every rank, if the ranks
    hold one value per channel together.
    """
    verbs = verbs or kernels.select(args.x)
    recomputes = bool(recompute.state.stack)
    if recomputes:
        batch = recompute.replayed(statistics.channels(args.x.shape, args.axis))
        if batch is not None:
            return verbs.normalize(args, batch), batch
    y, batch = share(
        args, communicator, weighting=weighting, verbs=verbs, needs_gradient=needs_gradient
    )
    if recomputes:
        recompute.record(batch, args, communicator)
    return y, batch


def share(
    args: NormArgs,
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
    verbs: Any,
    phase: str = "forward",
    needs_gradient: bool = True,
) -> tuple[Any, BatchStatistics]:
    """As `forward`, and of no concern to `recompute`."""
    _, count, length, _ = statistics.sizes(args.x.shape, args.axis)
    weight: Any = count
    if args.mask is not None or weighting != "element":
        weight, count = masks.weigh(args, count, weighting)
    during, memory, mark = _message(communicator, phase, args.x, length, needs_gradient)
    summed = during.allreduce(verbs.begin_forward(args, weight, count, mark, out=memory))
    pool = args.running if type(args.running) is StepAccumulator else None
    moving = args if pool is None else args._replace(running=None)
    y, batch, state = verbs.finish_forward(moving, summed, weight, count)
    if (
        state == CANCELLED
    ):  # on all ranks, from the same sums: a message more, of moments about the mean
        options: Any = {"weighting": weighting, "verbs": verbs, "phase": "about the mean"}
        about, centre = reference.about(args, batch.mean)
        _, near = share(about, communicator, **options)
        batch = near._replace(mean=centre + near.mean)
        if args.running is not None:
            update_running(args.running, batch, count)
        return verbs.normalize(args, batch), batch
    if state != OK:
        statistics.raise_for(state, during, summed, args.x)
        batch = reference.skipped(batch)
        y = verbs.normalize(args, batch)
    elif (
        args.mask is not None
        and is_on_host(batch.count)
        and batch.count == 0
        and bool((values(summed[-2]) > 0).any())  # a weight: a batch without elements is no error
    ):
        raise ValueError(
            "`mask` or `lengths` must leave an element of the batch: got none over "
            f"{communicator.size} rank(s) together, with an input of shape {tuple(args.x.shape)} "
            f"on rank {communicator.rank}."
        )
    if pool is not None:
        pool.add(batch, local_count=count)
    return y, batch


def update_running(
    running: Running | StepAccumulator, batch: BatchStatistics, local_count: Array
) -> None:
    """Move running statistics by those of a batch, or add the batch to a pool."""
    if isinstance(running, StepAccumulator):
        running.add(batch, local_count=local_count)
    else:
        reference.update_running(running, *batch[:3], local_count)


def backward(
    g: Gradient, communicator: Communicator, /, *, means: bool = False, verbs: Any = None
) -> Gradients:
    """The gradients of a layer's input, residual and parameters.

    Collective if `x` needs a gradient: one allreduce of 2C+4 float64 numbers. The gradients of
    parameters are this rank's, or, with `means`, the means over the ranks; then `x` must need a
    gradient. `verbs` as in `forward`.
    """
    x = g.input.x
    verbs = verbs or kernels.select(x)
    if not g.needs_dx:
        _, dweight, dbias, *_ = verbs.begin_backward(g)
        return None, None, dweight, dbias
    length = statistics.sizes(x.shape, g.input.axis)[3]
    communicator, memory, _ = _message(communicator, "backward", x, length)
    payload, dweight, dbias, *begun = verbs.begin_backward(g, out=memory)
    summed = communicator.allreduce(payload)
    if means:
        dweight, dbias = reference.parameter_gradients(summed, g, divisor=communicator.size)
    return *verbs.finish_backward(g, summed, *begun), dweight, dbias


def _message(
    communicator: Communicator, phase: str, x: Array, length: int, needs_gradient: bool = True
) -> tuple[Communicator, Any, float]:
    """The communicator of a message about `x`, memory for its payload of this length, and a mark.

    On a GPU of torch's a `Message`; None where the communicator has no memory to offer. The mark is
    this rank's, see `multibn.wire`. Collective at the first call.
    """
    if type(communicator) is LayerCommunicator:
        communicator = communicator.during(phase, x.dtype, needs_gradient)
    if type(communicator) is LayerPhase:
        if type(x) is np.ndarray or getattr(x, "is_cpu", False):
            return communicator, communicator.buffer(length), communicator.mark
        if getattr(x, "is_cuda", False):
            return communicator, communicator.message(length, x), communicator.mark
    return communicator, None, wire.mark(communicator.rank)
