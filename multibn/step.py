"""A training step of layers: two halves each way, with one message between them.

The functions of `multibn.statistics` are for people; the layers of both frameworks run here, by the
verbs of `multibn.kernels`. Layers that are ready at the same time share a message.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from multibn import kernels, message, recompute, statistics
from multibn._arrays import is_on_host
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator
from multibn.communicators.conversation import Phase, during
from multibn.kernels import RIGHT, Running, generic
from multibn.statistics import BatchStatistics


class Input(NamedTuple):
    """The input of one layer, with the layer's parameters, options and running statistics.

    `axis` names the axes to reduce. `weight` and `bias` have the shape of the other axes, `(C,)`.
    `residual`, an array like `x`, is added to the normalized input; `relu` follows the addition.
    The forward pass moves `running` in place, unless `multibn.recompute` runs the pass again.
    """

    x: Array
    weight: Array | None
    bias: Array | None
    eps: float
    axis: tuple[int, ...] = ()
    residual: Array | None = None
    relu: bool = False
    running: Running | None = None


class Gradient(NamedTuple):
    """The gradient of one output, and the values that made the output."""

    dy: Array
    input: Input
    batch: BatchStatistics
    needs_dx: bool = True
    y: Array | None = None  # the output, if there was a ReLU after a residual


# Of x; of the residual, if there was a ReLU after the residual; of weight and bias.
Gradients: TypeAlias = tuple[Array | None, Array | None, Array | None, Array | None]


def forward(
    inputs: Sequence[Input], communicator: Communicator, /, *, weighting: Weighting
) -> list[tuple[Array, BatchStatistics]]:
    """Normalize each input by the batch that all ranks hold together.

    Collective, one allreduce of 2C+2 float64 numbers for each input, unless `multibn.recompute`
    replays the statistics. Raises as `statistics.batch_statistics`.
    """
    if not recompute.is_active():
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
    select: Callable[..., Any] = kernels.select,
) -> list[tuple[Array, BatchStatistics]]:
    """As `forward`, by the kernels that `select` chooses, and of no concern to `recompute`."""
    shares = []
    lengths = []
    for i in inputs:
        x, axis = i.x, i.axis
        _, count, length = statistics.sizes(x.shape, axis)
        weight = count
        if weighting != "element":
            weight = statistics.rank_weight(count, float(x.shape[axis[0]]), weighting)
        shares.append((select(x), x, axis, weight, count))
        lengths.append(length)

    def begin(n: int, out: Array | None) -> Array:
        k, x, axis, weight, count = shares[n]
        return k.begin_forward(x, weight, count, axis=axis, out=out)

    def check(n: int, state: int) -> None:
        if state != RIGHT:
            # Packed again: the sum may have taken the place of this rank's own numbers.
            statistics.raise_for(state, phase, begin(n, None), inputs[n].x)

    phase = during(communicator, "forward", announced(inputs))
    sums = _exchange(phase, x, lengths, begin)
    if len(sums) > 1:  # no running statistics may move where another layer's sum is wrong
        for n, summed in enumerate(sums):
            check(n, generic.state(summed, shares[n][-1]))
    results = []
    for n, summed in enumerate(sums):
        k, x, axis, *share = shares[n]
        _, weight, bias, eps, _, residual, relu, running = inputs[n]
        y, mean, var, count, element_weight, state = k.finish_forward(
            summed,
            x,
            weight,
            bias,
            *share,
            eps=eps,
            axis=axis,
            residual=residual,
            relu=relu,
            running=running,
        )
        check(n, state)
        results.append((y, BatchStatistics(mean, var, count, element_weight)))
    return results


def backward(
    gradients: Sequence[Gradient], communicator: Communicator, /, *, means: bool = False
) -> list[Gradients]:
    """The gradients of each layer's input, residual and parameters.

    Collective if any `x` needs a gradient: one allreduce of 2C float64 numbers for each of these.
    The gradients of parameters are this rank's; with `means`, for which all inputs must need a
    gradient, they are the means over the ranks.
    """
    calls = []
    sent = []
    lengths = []
    for n, (dy, i, batch, needs_dx, y) in enumerate(gradients):
        x, weight, bias, eps, axis, _, relu, _ = i
        mean, var, _, element_weight = batch
        options = {"eps": eps, "axis": axis, "relu": relu, "y": y}
        calls.append((kernels.select(x), (dy, x, mean, var, weight, bias), element_weight, options))
        if needs_dx:
            sent.append(n)
            lengths.append(message.backward_payload(math.prod(mean.shape)))
    results: list[Any] = [None] * len(calls)

    def begin(n: int, out: Array | None) -> Array:
        k, arguments, _, options = calls[n]
        payload, *parameters = k.begin_backward(*arguments, out=out, **options)
        results[n] = None, None, *parameters
        return payload

    for n, g in enumerate(gradients):
        if not g.needs_dx:
            begin(n, None)
            if g.y is not None:
                results[n] = None, generic.rectified(g.dy, g.y), *results[n][2:]
    if not sent:
        return results
    about = [gradients[n].input for n in sent]
    phase = during(communicator, "backward", announced(about))
    sums = _exchange(phase, about[0].x, lengths, lambda n, out: begin(sent[n], out))
    for n, summed in zip(sent, sums, strict=True):
        k, arguments, element_weight, options = calls[n]
        parameters = results[n][2:]
        if means:
            _, _, mean, _, *of = arguments
            parameters = generic.parameter_gradients(summed, mean.shape, *of, communicator.size)
        gradient = k.finish_backward(summed, *arguments, element_weight, **options)
        results[n] = *gradient, *parameters
    return results


def announced(inputs: Sequence[Input], /) -> Any:
    """The dtype that a message about some inputs announces: one dtype, or the names of several."""
    if len(inputs) == 1:
        return inputs[0].x.dtype
    return ", ".join(str(i.x.dtype).rpartition(".")[2] for i in inputs)


def _exchange(
    communicator: Communicator,
    x: Array,
    lengths: Sequence[int],
    begin: Callable[[int, Array | None], Array],
) -> Sequence[Array]:
    """Sums over the ranks of payloads of so many numbers, in one message. Collective.

    `begin(n, out)` makes the n-th payload, in `out` if that is memory. `x` tells where they are.
    """
    memory = None
    if type(communicator) is Phase and is_on_host(x):
        memory = communicator.buffer(sum(lengths))
    if len(lengths) == 1:
        return (communicator.allreduce(begin(0, memory)),)
    if memory is None:
        payload = message.concat([begin(n, None) for n in range(len(lengths))])
    else:
        payload = memory
        for n, out in enumerate(message.split(memory, lengths)):
            begin(n, out)
    return message.split(communicator.allreduce(payload), lengths)


def _normalize(i: Input, batch: BatchStatistics) -> Array:
    x, weight, bias, eps, axis, residual, relu, _ = i
    options: Any = {"eps": eps, "axis": axis, "residual": residual, "relu": relu}
    return statistics.normalize(x, batch, weight=weight, bias=bias, **options)
