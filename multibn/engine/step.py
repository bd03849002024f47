"""A training step of layers: two halves each way, with one message between them.

The functions of `engine.statistics` are for people; the layers of both frameworks run here, by the
verbs of `multibn.kernels`. Layers that are ready at the same time share a message.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from multibn import kernels, message
from multibn._arrays import is_on_host, values
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import Conversation
from multibn.communicators.phase import Phase
from multibn.engine import masks, recompute, statistics
from multibn.engine.population import Pool
from multibn.kernels import LOST, RIGHT, BatchStatistics, Running, generic
from multibn.kernels import Gradient as Gradient
from multibn.kernels import Input as Input
from multibn.message import Message

# Of x; of the residual, or None, see `generic.residual_gradient`; of weight and bias.
Gradients: TypeAlias = tuple[Array | None, Array | None, Array | None, Array | None]


def forward(
    inputs: Sequence[Input],
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
    select: Callable[[Array], Any] | None = None,
    needs_gradient: bool = True,
) -> list[tuple[Any, BatchStatistics]]:
    """Normalize each input by the batch that all ranks hold together.

    `select` chooses the kernels for an array, in place of `kernels.select`; what they make of the
    input is returned. `needs_gradient` says whether a `backward` may follow, and is compared.

    Collective, one allreduce of 2C+2 float64 numbers for each input, unless `engine.recompute`
    replays the statistics; another one for inputs with a variance that is lost beside the square of
    the mean, on the host. Raises as `statistics.aggregate`, and OneValueError, a
    ValueError, on every rank, if the ranks hold one value per channel together.
    """
    select = select or kernels.select
    recomputes = bool(recompute.state.stack)
    if recomputes:
        batches = recompute.replayed([statistics.channels(i.x.shape, i.axis) for i in inputs])
        if batches is not None:
            pairs = zip(inputs, batches, strict=True)
            return [(select(i.x).normalize(i, batch), batch) for i, batch in pairs]
    results = share(
        inputs, communicator, weighting=weighting, select=select, needs_gradient=needs_gradient
    )
    if recomputes:
        recompute.record([batch for _, batch in results], inputs, communicator)
    return results


def share(
    inputs: Sequence[Input],
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
    select: Callable[[Array], Any] | None = None,
    phase: str = "forward",
    needs_gradient: bool = True,
) -> list[tuple[Any, BatchStatistics]]:
    """As `forward`, and of no concern to `recompute`."""
    select = select or kernels.select
    shares: list[tuple[Any, Input, Any, Any]] = []
    xs, lengths = [], []
    for i in inputs:
        _, count, length, _ = statistics.sizes(i.x.shape, i.axis)
        weight: Any = count
        if i.mask is not None or weighting != "element":
            weight, count = masks.weigh(i, count, weighting)
        shares.append((select(i.x), i, weight, count))
        xs.append(i.x)
        lengths.append(length)

    def begin(n: int, out: Any) -> Any:
        k, i, weight, count = shares[n]
        return k.begin_forward(i, weight, count, out=out)

    sharing = communicator
    communicator, sums = _exchange(communicator, phase, xs, lengths, begin, needs_gradient)
    is_skipped = False
    if len(inputs) > 1:  # no running statistics may move where another layer's sum is wrong
        for own, summed in zip(shares, sums, strict=True):
            state = generic.state(summed, own[-1])
            if state != RIGHT:
                _raise(state, communicator, *own)
                is_skipped = True
            elif own[1].mask is not None and generic.has_no_element(summed):
                require_element(summed[-2], own[1].x.shape, communicator)
    results: list[Any] = []
    lost = []
    for n, (k, i, weight, count) in enumerate(shares):
        pool = i.running if type(i.running) is Pool else None
        moving = i if pool is None and not is_skipped else i._replace(running=None)
        y, batch, state = k.finish_forward(moving, sums[n], weight, count)
        if is_skipped or state not in (RIGHT, LOST):
            if not is_skipped:
                _raise(state, communicator, k, i, weight, count)
            batch = generic.skipped(batch)
            y = k.normalize(i, batch)
        elif state == LOST:
            lost.append(n)
        elif i.mask is not None and is_on_host(batch.count) and batch.count == 0:
            require_element(sums[n][-2], i.x.shape, communicator)
        if pool is not None and n not in lost:
            pool.add(batch, local_count=count)
        results.append((y, batch))
    if lost:  # on all ranks, from the same sums: a message more, of moments about these means
        about = [generic.about(inputs[n], results[n][1].mean) for n in lost]
        options: Any = {"weighting": weighting, "select": select, "phase": "about the mean"}
        near = share([i for i, _ in about], sharing, **options)
        for n, (_, centre), (_, batch) in zip(lost, about, near, strict=True):
            i, batch = inputs[n], batch._replace(mean=centre + batch.mean)
            results[n] = select(i.x).normalize(i, batch), batch
            if i.running is not None:
                move(i.running, batch, shares[n][-1])
    return results


def require_element(weight: Array, shape: Sequence[int], communicator: Communicator) -> None:
    """Raise if masks leave none of the elements of all ranks, whose weight is then not 0.

    A batch that is empty on all ranks is no error. `shape` is that of the input.
    """
    if bool((values(weight) > 0).any()):
        raise ValueError(
            "`mask` or `lengths` must leave an element of the batch: got none over "
            f"{communicator.size} rank(s) together, with an input of shape {tuple(shape)} on "
            f"rank {communicator.rank}."
        )


def move(running: Running | Pool, batch: BatchStatistics, local_count: Array) -> None:
    """Move running statistics by those of a batch, or add the batch to a pool."""
    if isinstance(running, Pool):
        running.add(batch, local_count=local_count)
    else:
        generic.move(running, *batch[:3], local_count)


def backward(
    gradients: Sequence[Gradient],
    communicator: Communicator,
    /,
    *,
    means: bool = False,
    select: Callable[[Array], Any] | None = None,
) -> list[Gradients]:
    """The gradients of each layer's input, residual and parameters.

    Collective if any `x` needs a gradient: one allreduce of 2C float64 numbers for each of these.
    The gradients of parameters are this rank's, or, with `means`, the means over the ranks; then
    every `x` must need a gradient.
    """
    select = select or kernels.select
    results: list[Any] = [None] * len(gradients)
    sharing, about, xs, lengths = [], [], [], []
    for n, g in enumerate(gradients):
        k = select(g.input.x)
        if g.needs_dx:
            sharing.append((n, k))
            about.append(g)
            xs.append(g.input.x)
            lengths.append(statistics.sizes(g.input.x.shape, g.input.axis)[3])
        else:
            _, dweight, dbias, *_ = k.begin_backward(g)
            results[n] = None, None, dweight, dbias
    if not sharing:
        return results

    def begin(place: int, out: Any) -> Any:
        n, k = sharing[place]
        payload, *results[n] = k.begin_backward(about[place], out=out)
        return payload

    communicator, sums = _exchange(communicator, "backward", xs, lengths, begin)
    for place, (n, k) in enumerate(sharing):
        g, summed = about[place], sums[place]
        dweight, dbias, *begun = results[n]
        if means:
            dweight, dbias = generic.parameter_gradients(summed, g, divisor=communicator.size)
        dx, dresidual = k.finish_backward(g, summed, *begun)
        results[n] = dx, dresidual, dweight, dbias
    return results


def announced(xs: Sequence[Array], /) -> Any:
    """The dtype that a message about some inputs announces: one dtype, or the names of several."""
    if len(xs) == 1:
        return xs[0].dtype
    return ", ".join(str(x.dtype).rpartition(".")[2] for x in xs)


def _exchange(
    communicator: Communicator,
    phase: str,
    xs: Sequence[Array],
    lengths: Sequence[int],
    begin: Callable[[int, Any], Any],
    needs_gradient: bool = True,
) -> tuple[Communicator, Sequence[Array]]:
    """The communicator of a message about inputs `xs`, and the sums of their payloads. Collective.

    `begin` makes the payload of an input, in memory that it gets, on a GPU of torch's a `Message`.
    """
    x = xs[0]
    if type(communicator) is Conversation:
        dtype = x.dtype if len(xs) == 1 else announced(xs)
        key = phase, dtype, needs_gradient
        known = communicator.phases.get(key)
        communicator = communicator.during(*key) if known is None else known
    memory: Any = None
    if type(communicator) is Phase:
        if type(x) is np.ndarray or getattr(x, "is_cpu", False):
            memory = communicator.buffer(sum(lengths))
        elif getattr(x, "is_cuda", False) and all(other.device == x.device for other in xs):
            memory = communicator.message(sum(lengths), x)
    if len(xs) == 1:
        return communicator, (communicator.allreduce(begin(0, memory)),)
    outs: Sequence[Any] = [None] * len(xs)
    if memory is not None:
        parts = Message.split if isinstance(memory, Message) else message.split
        outs = parts(memory, lengths)
    payloads = [begin(n, out) for n, out in enumerate(outs)]
    summed = communicator.allreduce(message.concat(payloads) if memory is None else memory)
    return communicator, message.split(summed, lengths)


def _raise(
    state: int, communicator: Communicator, k: Any, i: Input, weight: Any, count: Any
) -> None:
    """Raise for a sum of messages that is not right, unless the batch is to be skipped."""
    # Packed again: the sum may have taken the place of this rank's own numbers.
    payload = k.begin_forward(i, weight, count)
    statistics.raise_for(state, communicator, payload, i.x)
