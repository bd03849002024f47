"""Training on uneven data: ranks without data left take part with stand-ins of no weight."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
from chainer import functions as F
from chainer import links as L
from chainer.dataset import concat_examples

from multibn import kernels
from multibn.chainer_backend import functions
from multibn.chainer_backend.links import MultiNodeBatchNormalization
from multibn.chainer_backend.synchrony import participants
from multibn.communicators import Communicator, SingleProcess
from multibn.engine import lockstep, statistics
from multibn.kernels import Input


class Joined(lockstep.Joined[chainer.Variable]):
    """The object that `join` yields; a call makes a loop over this rank's batches."""

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
        """As `engine.lockstep.Joined`, with the arrays that `converter` makes of each batch.

        `batches` is any iterable. A Chainer iterator is reset first. Raises ValueError if the
        iterator never ends.
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
    most batches. A rank without data left gets two samples as a stand-in, because some of Chainer's
    functions (max pooling, for example) refuse empty batches. The stand-in has no weight:
    multi-node links use an empty batch in its place and return no gradient, other links keep their
    moving averages, and `Joined.mean`, which the loss needs, leaves it out.

    Parameters
    ----------
    model
        The model to train. Until the end of the context, its batch normalization links have another
        `forward`.
    comm
        The ranks that take part, as in `check_sync`.
    converter
        Makes arrays of a batch, `converter(batch, device)`; None if batches are arrays already. The
        arrays, in tuples, lists and dictionaries too, have the samples on their first axis.
    device
        The device for `converter`; default: that of `model`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        For `comm` as `check_sync`, in the loop as `engine.lockstep.Joined`. At the end of the
        context RuntimeError on all ranks, if some left the loop while others had batches. All ranks
        may leave the loop in the same step.

    Notes
    -----
    A rank that raises in the body of the loop cannot tell the others, which may wait for it: start
    scripts as `python -m mpi4py`, which ends them.

    Examples
    --------
    >>> import chainer, numpy as np
    >>> from chainer import functions as F, links as L
    >>> from multibn.chainer_backend import MultiNodeBatchNormalization, join
    >>> model = chainer.Sequential(MultiNodeBatchNormalization(4, None), L.Linear(4, 2))
    >>> optimizer = chainer.optimizers.SGD().setup(model)  # over ranks: a multi-node optimizer
    >>> batches = [(np.ones((n, 4), "f"), np.zeros(n, "i")) for n in (8, 3)]
    >>> with join(model, converter=None) as joined:
    ...     for x, target in joined(batches):
    ...         losses = F.softmax_cross_entropy(model(x), target, reduce="no")
    ...         loss = joined.mean(losses)
    ...         model.cleargrads()
    ...         loss.backward()
    ...         optimizer.update()
    >>> optimizer.t
    2
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
        joined.leave()  # not after an exception: the other ranks may be in another collective
    finally:
        for link in norms:
            del link.forward


_ALONE = SingleProcess()
_NORMS = MultiNodeBatchNormalization, L.BatchNormalization


def _forward(
    link: Any, forward: Callable[..., Any], joined: Joined, x: Any, *finetune: bool, **options: Any
) -> chainer.Variable:
    """`forward(x)`; a stand-in is normalized by itself, so that deep models stay in range."""
    if not (joined.absent and chainer.config.train):
        return forward(x, *finetune, **options)
    if isinstance(link, L.BatchNormalization):
        decay, link.decay = link.decay, 1.0  # with decay 1 the moving averages stay
        try:
            return forward(x)
        finally:
            link.decay = decay
    v = functions.standard_layout(chainer.as_variable(x))
    batch_axis = 0 if link.axis is None else link.axis[0]
    none = (slice(None),) * batch_axis + (slice(0),)
    # Call the link on an empty slice, for its collectives forward and backward. Append a constant,
    # so that the next layers get a batch.
    masks = {name: options.pop(name, None) for name in ("mask", "lengths")}
    residual = functions.standard_layout(options.pop("residual", None))
    options["residual"] = None if residual is None else residual[none]
    empty = forward(v[none], *finetune, **options)
    axis, mask = functions.check_input(v, link.avg_mean.shape, link.axis, _ALONE, **masks)
    batch = statistics.aggregate(statistics.local_moments(v.array, axis=axis, mask=mask), _ALONE)
    weight, bias = map(chainer.as_array, link._scale_and_shift())
    i = Input(v.array, weight, bias, link.eps, axis, mask=mask)
    own = kernels.select(v.array).normalize(i, batch)
    return functions.with_layout_of(x, F.concat([empty, own], axis=batch_axis))


def _two_samples(batch: Any) -> Any:
    return lockstep.shortened(
        batch,
        lambda x: x[:2].copy(),  # of one sample, L.BatchNormalization would warn
        chainer.get_array_types(),
        otherwise="Pass a `converter` that makes arrays.",
    )
