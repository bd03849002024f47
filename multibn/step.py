"""A training step of layers: two halves each way, with one message between them.

The functions of `multibn.statistics` are for people; the layers of both frameworks run here, by the
verbs of `multibn.kernels`. Layers that are ready at the same time share a message.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multibn import kernels, masks, message, recompute, statistics
from multibn._arrays import is_on_host
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import Conversation, Phase
from multibn.kernels import RIGHT, Running, generic
from multibn.population import Pool
from multibn.statistics import BatchStatistics


class Input(NamedTuple):
    """The input of one layer, with the layer's parameters, options and running statistics.

    `axis` names the axes to reduce. `weight` and `bias` have the shape of the other axes, `(C,)`.
    `residual`, an array like `x`, is added to the normalized input; `relu` follows the addition.
    `mask`, see `multibn.masks`, says which elements count; in frameworks, before the input is
    checked, a `masks.Asked`. The forward pass moves `running` in place, or adds the batch to a
    pool, unless `multibn.recompute` runs the pass again.
    """

    x: Array
    weight: Array | None
    bias: Array | None
    eps: float
    axis: tuple[int, ...] = ()
    residual: Array | None = None
    relu: bool = False
    running: Running | Pool | None = None
    mask: Any = None


class Gradient(NamedTuple):
    """The gradient of one output, and the values that made the output, as `Input` names them."""

    dy: Array
    x: Array
    weight: Array | None
    bias: Array | None
    batch: BatchStatistics
    eps: float
    axis: tuple[int, ...]
    relu: bool = False
    y: Array | None = None  # the output, if there was a ReLU after a residual
    mask: Array | None = None
    needs_dx: bool = True


# Of x; of the residual, if there was a ReLU after the residual; of weight and bias.
Gradients: TypeAlias = tuple[Array | None, Array | None, Array | None, Array | None]


def forward(
    inputs: Sequence[Input], communicator: Communicator, /, *, weighting: Weighting
) -> list[tuple[Array, BatchStatistics]]:
    """Normalize each input by the batch that all ranks hold together.

    Collective, one allreduce of 2C+2 float64 numbers for each input, unless `multibn.recompute`
    replays the statistics. Raises as `statistics.batch_statistics`.
    """
    if not recompute.state.stack:
        return share(inputs, communicator, weighting=weighting)
    batches = recompute.replayed([statistics.channels(i.x, i.axis) for i in inputs])
    if batches is not None:
        return [(_normalize(i, batch), batch) for i, batch in zip(inputs, batches, strict=True)]
    results = share(inputs, communicator, weighting=weighting)
    recompute.record([batch for _, batch in results])
    return results


def share(
    inputs: Sequence[Input],
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
    select: Callable[[Array], Any] | None = None,
) -> list[tuple[Array, BatchStatistics]]:
    """As `forward`, by the kernels that `select` chooses, and of no concern to `recompute`."""
    select = select or kernels.select
    shares = []
    lengths = []
    for x, _, _, _, axis, _, _, _, mask in inputs:
        _, count, length, _ = statistics.sizes(x.shape, axis)
        weight = count
        if mask is not None:
            weight, count = masks.share(mask, weighting, axis=axis)
        elif weighting != "element":
            weight = statistics.rank_weight(count, float(x.shape[axis[0]]), weighting)
        shares.append((select(x), x, axis, mask, weight, count))
        lengths.append(length)
    communicator, memory, outs = _open(communicator, "forward", inputs, lengths)
    payloads = []
    for n, (k, x, axis, mask, weight, count) in enumerate(shares):
        payloads.append(k.begin_forward(x, weight, count, axis=axis, mask=mask, out=outs[n]))
    if len(payloads) == 1:
        sums: Sequence[Array] = (communicator.allreduce(payloads[0]),)
    else:
        sums = _send(communicator, memory, payloads, lengths)
        # No running statistics may move where another layer's sum is wrong.
        for own, summed in zip(shares, sums, strict=True):
            _check(generic.state(summed, own[-1]), communicator, own)
    results = []
    for n, own in enumerate(shares):
        k, x, axis, mask, weight, count = own
        _, gamma, beta, eps, _, residual, relu, running, _ = inputs[n]
        y, mean, var, total, element_weight, state = k.finish_forward(
            sums[n], x, gamma, beta, weight, count,
            eps=eps, axis=axis, residual=residual, relu=relu, mask=mask,
            running=running if type(running) is Running else None,
        )  # fmt: skip
        if state != RIGHT:
            _check(state, communicator, own)
        batch = BatchStatistics(mean, var, total, element_weight)
        if mask is not None and is_on_host(total):
            require_element(total, x.shape, communicator)
        if type(running) is Pool:
            running.add(batch, local_count=count)
        results.append((y, batch))
    return results


def require_element(count: Array, shape: Sequence[int], communicator: Communicator) -> None:
    """Raise if masks leave none of the elements of all ranks; `shape` is that of the input."""
    if count == 0:
        raise ValueError(
            "`mask` or `lengths` must leave an element of the batch: got none over "
            f"{communicator.size} rank(s) together, with an input of shape {tuple(shape)} on "
            f"rank {communicator.rank}."
        )


def move(
    running: Running | Pool, batch: BatchStatistics, local_count: Array, k: Any = None
) -> None:
    """Move running statistics by those of a batch, by the kernels `k`, or add it to a pool."""
    if isinstance(running, Pool):
        running.add(batch, local_count=local_count)
    else:
        (k or kernels.select(batch.mean)).move(running, *batch[:3], local_count)


def backward(
    gradients: Sequence[Gradient], communicator: Communicator, /, *, means: bool = False
) -> list[Gradients]:
    """The gradients of each layer's input, residual and parameters.

    Collective if any `x` needs a gradient: one allreduce of 2C float64 numbers for each of these.
    The gradients of parameters are this rank's, or, with `means`, the means over the ranks; then
    every `x` must need a gradient.
    """
    results: list[Any] = [None] * len(gradients)
    sharing = []
    about = []
    lengths = []
    for n, gradient in enumerate(gradients):
        dy, x, weight, bias, (mean, var, _, element_weight), eps, axis, relu, y, mask, needs_dx = (
            gradient
        )
        arguments = dy, x, mean, var, weight, bias
        options = {"eps": eps, "axis": axis, "relu": relu, "y": y, "mask": mask}
        k = kernels.select(x)
        if needs_dx:
            sharing.append((n, k, arguments, element_weight, options))
            about.append(gradient)
            lengths.append(statistics.sizes(x.shape, axis)[3])
        else:
            _, *parameters = k.begin_backward(*arguments, **options)
            results[n] = None, None if y is None else generic.rectified(dy, y), *parameters
    if not sharing:
        return results
    communicator, memory, outs = _open(communicator, "backward", about, lengths)
    payloads = []
    for place, (n, k, arguments, _, options) in enumerate(sharing):
        payload, *results[n] = k.begin_backward(*arguments, out=outs[place], **options)
        payloads.append(payload)
    if len(payloads) == 1:
        sums: Sequence[Array] = (communicator.allreduce(payloads[0]),)
    else:
        sums = _send(communicator, memory, payloads, lengths)
    for place, (n, k, arguments, element_weight, options) in enumerate(sharing):
        summed, parameters = sums[place], results[n]
        if means:
            _, _, mean, _, weight, bias = arguments
            shape, size = mean.shape, communicator.size
            parameters = generic.parameter_gradients(summed, shape, weight, bias, size)
        dx, dresidual = k.finish_backward(summed, *arguments, element_weight, **options)
        results[n] = dx, dresidual, *parameters
    return results


def local_count(i: Input, /) -> float | Array:
    """This rank's elements per channel."""
    if i.mask is None:
        return statistics.sizes(i.x.shape, i.axis)[1]
    return masks.share(i.mask, "element", axis=i.axis)[1]


def announced(inputs: Sequence[Input | Gradient], /) -> Any:
    """The dtype that a message about some inputs announces: one dtype, or the names of several."""
    if len(inputs) == 1:
        return inputs[0].x.dtype
    return ", ".join(str(i.x.dtype).rpartition(".")[2] for i in inputs)


def _open(
    communicator: Communicator,
    phase: str,
    inputs: Sequence[Input | Gradient],
    lengths: Sequence[int],
) -> tuple[Communicator, Array | None, Sequence[Any]]:
    """The communicator of a message about `inputs`, and memory: of all payloads, and of each.

    On a GPU, a `message.Message` for one payload.
    """
    x = inputs[0].x
    if type(communicator) is Conversation:
        dtype = x.dtype if len(inputs) == 1 else announced(inputs)
        known = communicator.phases.get((phase, dtype))
        communicator = communicator.during(phase, dtype) if known is None else known
    memory: Any = None
    if type(communicator) is Phase:
        if type(x) is np.ndarray or getattr(x, "is_cpu", False):
            memory = communicator.buffer(sum(lengths))
        elif len(lengths) == 1 and getattr(x, "is_cuda", False):
            memory = communicator.message(lengths[0], x)
    if memory is None or len(lengths) == 1:
        return communicator, memory, [memory] * len(lengths)
    return communicator, memory, message.split(memory, lengths)


def _send(
    communicator: Communicator,
    memory: Array | None,
    payloads: Sequence[Array],
    lengths: Sequence[int],
) -> Sequence[Array]:
    """The sums of several payloads over the ranks. Collective."""
    summed = communicator.allreduce(message.concat(payloads) if memory is None else memory)
    return message.split(summed, lengths)


def _check(state: int, communicator: Communicator, own: tuple[Any, ...]) -> None:
    """Raise unless the sum of a message is right."""
    if state != RIGHT:
        # Packed again: the sum may have taken the place of this rank's own numbers.
        k, x, axis, mask, *numbers = own
        payload = k.begin_forward(x, *numbers, axis=axis, mask=mask)
        statistics.raise_for(state, communicator, payload, x)


def _normalize(i: Input, batch: BatchStatistics) -> Array:
    x, weight, bias, eps, axis, residual, relu, _, mask = i
    options: Any = {"eps": eps, "axis": axis, "residual": residual, "relu": relu}
    y = statistics.normalize(x, batch, weight=weight, bias=bias, **options)
    return generic.masked(y, mask)
