"""Training on uneven data: ranks that have run out take part with what counts for nothing."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
from chainer import functions as F
from chainer import links as L
from chainer.dataset import concat_examples

from multibn import lockstep, statistics
from multibn.chainer_backend import functions
from multibn.chainer_backend.links import MultiNodeBatchNormalization
from multibn.chainer_backend.participants import participants
from multibn.communicators import Communicator, SingleProcess


class Joined(lockstep.Joined[chainer.Variable]):
    """What `join` gives: called with this rank's iterator, it makes a loop over its batches."""

    _sum = staticmethod(F.sum)
    _unreduced = 'reduce="no"'

    def __init__(
        self,
        communicator: Communicator,
        stand_in: Callable[[Any], Any],
        convert: Callable[[Any], Any],
    ) -> None:
        super().__init__(communicator, stand_in)
        self._convert = convert

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """As `multibn.lockstep.Joined`, of batches that are converted first.

        `batches` is any iterable, or a Chainer iterator, which is reset first. Raises ValueError if
        the iterator repeats for ever.
        """
        if getattr(batches, "repeat", False):
            raise ValueError(
                "`batches` must end after one pass: got an iterator that repeats. Make it with "
                "repeat=False."
            )
        if hasattr(batches, "reset"):
            batches.reset()
        return super().__call__(map(self._convert, batches))


@contextmanager
def join(
    model: chainer.Link,
    comm: Any = None,
    *,
    converter: Callable[..., Any] | None = concat_examples,
    device: Any = None,
) -> Iterator[Joined]:
    """Let ranks with unequal numbers of batches train a model together, with exact statistics.

    A context manager for a training loop in which every rank makes as many steps as the one with
    most batches. A rank that has run out is given two samples as a stand-in, because Chainer's
    functions refuse empty batches (max pooling among them). It counts for nothing: the multi-node
    links are shown an empty batch and pass no gradient on, others keep their moving averages, and
    `Joined.mean`, which the loss must be made with, leaves it out. Example, with an optimizer of
    chainermn.create_multi_node_optimizer::

        with join(model, comm) as joined:
            for x, target in joined(iterator):
                losses = F.softmax_cross_entropy(model(x), target, reduce="no")
                loss = joined.mean(losses)
                model.cleargrads()
                loss.backward()
                optimizer.update()

    Parameters
    ----------
    model
        The model to train. Inside the context its batch normalization links behave as said.
    comm
        The ranks that take part, anything that `multibn.as_communicator` takes. Default: the
        largest group of the model's multi-node links.
    converter
        Makes arrays of a batch, `converter(batch, device)`; None if batches are arrays already. The
        arrays, in tuples, lists and dictionaries too, have the samples on their first axis.
    device
        Where to; default: that of `model`.

    Yields
    ------
    Joined
        `joined(iterator)` is the loop, `joined.mean(losses)` the loss, and `joined.absent` whether
        the batch is a stand-in.

    Raises
    ------
    ValueError
        If `comm` is None and a launcher started several processes, but the model's links tell of
        none other than this one.
    TypeError, ValueError, RuntimeError
        As `Joined`'s methods. On leaving the context: RuntimeError on all ranks, if some broke off
        the loop while others had batches. All may break off in the same step.

    Notes
    -----
    A rank that raises in the body of the loop cannot tell the others, which may wait for it in the
    forward pass: start scripts as `python -m mpi4py`, which ends them.
    """
    device = model.device if device is None else device

    def convert(batch: Any) -> Any:
        return batch if converter is None else converter(batch, device)

    joined = Joined(participants(model, comm), _two_samples, convert)
    # A link in two places of the model comes twice.
    norms: dict[Any, None] = dict.fromkeys(m for m in model.links() if isinstance(m, _NORMS))
    try:
        for link in norms:
            link.forward = partial(_forward, link, link.forward, joined)
        yield joined
        joined.leave()  # not after an exception, when the other ranks may be anywhere
    finally:
        for link in norms:
            del link.forward


_ALONE = SingleProcess()
_NORMS = MultiNodeBatchNormalization, L.BatchNormalization


def _forward(
    link: Any, forward: Callable[..., Any], joined: Joined, x: Any, **options: Any
) -> chainer.Variable:
    """What `link` makes of `x`, and, of a stand-in, what lets the rest of the model go on.

    That is normalized by its own statistics, so that a deep model stays in range.
    """
    if not (joined.absent and chainer.config.train):
        return forward(x, **options)
    if isinstance(link, L.BatchNormalization):
        decay, link.decay = link.decay, 1.0  # which keeps the moving averages
        try:
            return forward(x)
        finally:
            link.decay = decay
    x = chainer.as_variable(x)
    batch_axis = 0 if link.axis is None else link.axis[0]
    # An empty part of the graph, for what is collective in its forward and backward passes, beside
    # one that ends here.
    empty = forward(x[(slice(None),) * batch_axis + (slice(0),)], **options)
    axis = functions.check_input(x, link.avg_mean.shape, link.axis, _ALONE)
    batch = statistics.aggregate(statistics.local_moments(x.array, axis=axis), _ALONE)
    weight, bias = map(chainer.as_array, link._scale_and_shift())
    own = statistics.normalize(x.array, batch, weight=weight, bias=bias, eps=link.eps, axis=axis)
    return F.concat([empty, own], axis=batch_axis)


def _two_samples(batch: Any) -> Any:
    return lockstep.shortened(
        batch,
        lambda x: x[:2].copy(),  # one makes L.BatchNormalization warn
        chainer.get_array_types(),
        otherwise="Pass a `converter` that makes arrays.",
    )
