"""Training on uneven data: a rank that has run out of data continues with empty batches."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
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
                yield _copy_batch(placeholder[0]) if self.exhausted else step.batch
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
        A function that takes a batch and returns an empty batch of the same structure. Default: the
        first dimension of every tensor, also in tuples, lists and dictionaries, becomes 0. Numbers,
        strings and None are kept; other objects raise TypeError.

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
    def empty_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            emptied = leaf.new_empty((0, *leaf.shape[1:])) if leaf.ndim else leaf
            return emptied.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, (str, bytes, Number, type(None))):
            return leaf
        raise _cannot_empty("contain only tensors, numbers, strings and None", leaf)

    if not any(t.ndim for t in tensors_in(batch)):
        raise _cannot_empty("contain a tensor whose first dimension is the batch", batch)
    return _map_leaves(empty_leaf, batch)


def _cannot_empty(wanted: str, got: Any) -> TypeError:
    return TypeError(
        f"a batch must {wanted}: got {type(got).__qualname__}. Pass `empty`, a function "
        "that returns an empty batch like its argument."
    )


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order, also those in tuples, lists and mappings.

    A PackedSequence gives the tensor of its first step, which has all samples on the first axis.
    """
    if isinstance(batch, PackedSequence):
        batch = batch.data[: batch.batch_sizes[0]]
    if isinstance(batch, (list, tuple, MutableMapping)):
        parts = batch.values() if isinstance(batch, MutableMapping) else batch
        return [t for part in parts for t in tensors_in(part)]
    return [batch] if isinstance(batch, Tensor) else []


def _copy_batch(placeholder: Any) -> Any:
    """Return a copy of the placeholder, because the body of the loop may modify its batch."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    with suppress(TypeError):  # `empty` may return a type that _map_leaves cannot construct
        return _map_leaves(copy_leaf, placeholder)
    return placeholder


def _map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return `batch` with `function` applied to each item of its tuples, lists and mappings."""
    if isinstance(batch, MutableMapping):
        parts = {k: _map_leaves(function, v) for k, v in batch.items()}
        # A shallow copy of an object that wraps a dictionary may share this dictionary.
        is_plain = isinstance(batch, (dict, UserDict))
        mapping = copy.copy(batch) if is_plain else copy.deepcopy(batch)
        mapping.update(parts)
        return mapping
    if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
        items = [_map_leaves(function, item) for item in batch]
        try:
            return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
        except TypeError as error:  # the constructor takes other arguments
            raise _cannot_empty(
                "use list and tuple types that can be constructed from an iterable", batch
            ) from error
    return function(batch)
