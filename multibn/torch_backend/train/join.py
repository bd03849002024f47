"""Training on uneven data: a rank that has run out of data continues with empty batches."""

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from multibn.communicators import Communicator, CommunicatorLike
from multibn.communicators.channel import at
from multibn.engine.lockstep import END, Lockstep
from multibn.torch_backend.layer.base import check_module
from multibn.torch_backend.train.synchrony import participants

_Batch = TypeVar("_Batch")


class Joined:
    """Runs loops over uneven data in lockstep and scales the losses; `join` returns one.

    Attributes
    ----------
    communicator
        The ranks that train together.
    exhausted
        True if the last batch was an empty placeholder because this rank has no batch left.
    """

    def __init__(
        self, communicator: Communicator, empty: Callable[[Any], Any] | None = None
    ) -> None:
        self.communicator = communicator
        self.exhausted = False
        self._empty_batch = empty
        self._steps: Lockstep | None = None

    def __enter__(self) -> "Joined":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may be in another collective
            self.close()

    def __call__(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield this rank's batches, then empty placeholder batches until every rank is done.

        Each step is collective: one allreduce of W+1 numbers for W ranks. Call this object again
        for the next loop. Concurrent loops need a separate `join` each.

        Parameters
        ----------
        batches
            This rank's data, any number of batches.

        Raises
        ------
        TypeError
            If no empty batch can be built from a batch.
        ValueError
            On all ranks, if a rank has no batch at all: there is no example for an empty one.
        RuntimeError
            On the other ranks, if one rank's iterator raised. On all ranks, if some left the loop
            while others had batches. If this loop is resumed after another one has started.
        """
        self.close()
        placeholder: list[Any] = []  # empty until the first batch

        # Lockstep calls this function, and reports its errors to the other ranks.
        def keep_placeholder(batch: Any) -> int:
            if not placeholder:
                placeholder.append((self._empty_batch or _make_empty_batch)(batch))
            return 0

        steps = self._steps = Lockstep(
            batches,
            self.communicator,
            source="the iterator of the batches",
            place="join()",
            size_of=keep_placeholder,
            everywhere=True,
        )
        try:
            for step in steps:
                self.exhausted = step.batch is END
                # A copy, because the body of the loop may modify its batch.
                yield _copy(placeholder[0], Tensor.clone) if self.exhausted else step.batch
                if self._steps is not steps:
                    raise RuntimeError(
                        "this join() loop was resumed after another one had started or its `with` "
                        "block had ended. Use a separate join() for each concurrent loop."
                    )
        finally:  # also after `break`
            if self._steps is steps:
                self.exhausted = False

    def close(self) -> None:
        """Finish a loop exited with `break`. Collective: all ranks must break in the same step."""
        self.exhausted = False
        if self._steps is not None:
            self._steps.leave()
            self._steps = None

    def mean(self, losses: Tensor) -> Tensor:
        """Return this rank's part of the mean of all ranks' losses, shape `()`; 0 if exhausted.

        The average of the parts over the ranks is exactly the mean over all elements of all ranks.
        After DistributedDataParallel or `average_gradients`, the gradients are those of this mean.
        Collective: every rank must call this method in each step; one allreduce of one number.

        Parameters
        ----------
        losses
            One number for each sample or pixel, of any shape but `()`: pass `reduction="none"` to
            the loss function.

        Raises
        ------
        TypeError
            If `losses` is not a tensor.
        ValueError
            If `losses` has shape `()`, because it is already reduced.

        Notes
        -----
        If `empty` returns a batch with samples, `mean` ignores their losses if `exhausted` is True,
        which describes the batch fetched last. Do not prefetch batches then.
        """
        if not isinstance(losses, Tensor):
            raise TypeError(
                f"`losses` must be a tensor: got {type(losses).__qualname__}. Use torch.stack "
                "to combine the losses."
            )
        if losses.ndim == 0:
            raise ValueError(
                "`losses` must have a number for each sample: got shape (), which is reduced "
                'already. Pass reduction="none" to the loss function.'
            )
        # The default placeholder has no elements.
        is_placeholder = self.exhausted and self._empty_batch is not None
        count = 0 if is_placeholder else losses.numel()
        counts = np.array([count], dtype=np.float64)
        total = at(self.communicator, "the mean of join's losses").allreduce(counts)
        factor = 0.0 if is_placeholder else self.communicator.size / max(float(total[0]), 1.0)
        wide = torch.promote_types(losses.dtype, torch.float32)  # a sum in float16 may overflow
        return (losses.to(wide).sum() * factor).to(losses.dtype)


def join(
    model: nn.Module,
    process_group: CommunicatorLike = None,
    *,
    empty: Callable[[Any], Any] | None = None,
) -> Joined:
    """Let ranks with unequal numbers of batches train a model together, with exact statistics.

    Return a context manager for a training loop. Every rank makes as many steps as the rank with
    the most batches. A rank that has run out of data gets empty batches, shape `(0, ...)`, which
    have no weight in statistics and losses. Its forward and backward passes still communicate,
    also those of DistributedDataParallel, whose own `join` does not support synchronized layers.
    Without DistributedDataParallel, call `average_gradients` before the optimizer's step. The
    `with` is only needed if a rank may leave the loop early.

    Parameters
    ----------
    model
        The model to train; it is not changed.
    process_group
        The ranks that take part, as in `check_sync`.
    empty
        A function that takes a batch and returns an empty batch of the same structure, of which
        each step gets a deep copy. Default: the first dimension of every tensor, also in tuples,
        lists and dictionaries, becomes 0. Numbers, strings and None are kept; other objects raise
        TypeError.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `check_sync` for `process_group`, and as `Joined` in the loop. RuntimeError on all ranks
        at the end of the context, if some left the loop while others had batches. All ranks may
        leave the loop in the same step.

    Notes
    -----
    If one rank raises in the body of the loop, the other ranks may wait for it: let the launcher
    end them. The model must accept an empty batch: `x.flatten(1)` does, `x.view(len(x), -1)`
    raises.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from torch.nn import functional as F
    >>> from multibn.torch import SyncBatchNorm, average_gradients, join
    >>> model = nn.Sequential(SyncBatchNorm(4), nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = [(torch.randn(n, 4), torch.zeros(n, dtype=torch.long)) for n in (8, 3)]
    >>> with join(model) as joined:
    ...     for x, target in joined(loader):
    ...         optimizer.zero_grad()
    ...         losses = F.cross_entropy(model(x), target, reduction="none")
    ...         joined.mean(losses).backward()
    ...         average_gradients(model)  # without DistributedDataParallel
    ...         optimizer.step()
    >>> model[0].num_batches_tracked
    tensor(2)
    """
    check_module("model", model)
    return Joined(participants(model, process_group), empty)


def _make_empty_batch(batch: Any) -> Any:
    leaves = list(_leaves(batch))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, str, bytes, Number, type(None))):
            raise _cannot_empty("contain only tensors, numbers, strings and None", leaf)
    if not any(isinstance(t, Tensor) and t.ndim for t in leaves):
        raise _cannot_empty("contain a tensor whose first dimension is the batch", batch)
    try:
        empty = _copy(batch, lambda t: t.new_empty((0, *t.shape[1:])) if t.ndim else t.clone())
    except TypeError as error:  # the constructor takes other arguments
        raise _cannot_empty("use types that copy.deepcopy can copy", batch) from error
    if any(t.ndim and len(t) for t in tensors_in(empty)):
        raise _cannot_empty("use mappings that hold the tensors that they return", batch)
    return empty


def _cannot_empty(wanted: str, got: Any) -> TypeError:
    return TypeError(
        f"a batch must {wanted}: got {type(got).__qualname__}. Pass `empty`, a function "
        "that returns an empty batch like its argument."
    )


def _copy(batch: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Return a deep copy of `batch`, with the results of `copy_tensor` in place of its tensors."""
    # deepcopy takes for a copy of an object what its memo has under the object's id.
    tensors = [t for t in _leaves(batch) if isinstance(t, Tensor)]
    memo = {id(t): copy_tensor(t.detach()).requires_grad_(t.requires_grad) for t in tensors}
    return copy.deepcopy(batch, memo)


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the objects in a batch's tuples, lists and mappings, in order."""
    if isinstance(batch, (list, tuple, MutableMapping)) and not isinstance(batch, PackedSequence):
        for part in batch.values() if isinstance(batch, MutableMapping) else batch:
            yield from _leaves(part)
    else:
        yield batch


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order, also those in tuples, lists and mappings.

    A PackedSequence gives the tensor of its first step, which has all samples on the first axis.
    """
    found = [
        v.data[: v.batch_sizes[0]] if isinstance(v, PackedSequence) else v for v in _leaves(batch)
    ]
    return [v for v in found if isinstance(v, Tensor)]
