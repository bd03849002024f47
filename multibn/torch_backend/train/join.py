"""Training on uneven data: ranks without data left take part with empty batches."""

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
    """Training loops over uneven data in lockstep, with scaled losses; `join` returns it.

    Attributes
    ----------
    communicator
        The ranks that proceed together.
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

        Each step is collective: one allreduce of W+1 numbers for W ranks. Another loop may follow
        after the end of this one; loops at the same time need a `join` each.

        Parameters
        ----------
        batches
            This rank's data, any number of batches.

        Raises
        ------
        TypeError
            If no empty batch can be built from a batch.
        ValueError
            On all ranks, if a rank has no batch at all from which an empty one could be made.
        RuntimeError
            On the other ranks, if one rank's iterator raised; on all ranks, if some left the loop
            while others had batches, or if the loop goes on after another one has begun.
        """
        self.close()
        placeholder: list[Any] = []  # empty until the first batch

        # Lockstep calls this, and tells the other ranks of an error.
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
        finally:  # also of a loop that was left by `break`
            if self._steps is steps:
                self.exhausted = False

    def close(self) -> None:
        """Finish a loop exited with `break`; fine if all ranks break in the same step."""
        self.exhausted = False
        if self._steps is not None:
            self._steps.leave()
            self._steps = None

    def mean(self, losses: Tensor) -> Tensor:
        """This rank's part of the mean of all ranks' losses, of shape `()`; 0 for a placeholder.

        Averaged over the ranks, it is exactly the mean over all elements of all ranks. Its
        gradient, averaged by DistributedDataParallel or `average_gradients`, is that mean's
        gradient. Collective: every rank must call this method in each step; one allreduce of one
        number.

        Parameters
        ----------
        losses
            One number for each sample, pixel..., of any shape but `()`: pass `reduction="none"` to
            the loss function.

        Raises
        ------
        TypeError
            If `losses` is no tensor.
        ValueError
            If `losses` is a single number, so already reduced.

        Notes
        -----
        If `empty` returns a batch that is not empty, its losses are ignored only until the loop
        fetches its next batch: do not prefetch.
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
        wide = torch.promote_types(losses.dtype, torch.float32)  # the sum of 16 bits may overflow
        return (losses.to(wide).sum() * factor).to(losses.dtype)


def join(
    model: nn.Module,
    process_group: CommunicatorLike = None,
    *,
    empty: Callable[[Any], Any] | None = None,
) -> Joined:
    """Let ranks with unequal numbers of batches train a model together, with exact statistics.

    A context manager for a training loop in which every rank makes as many steps as the one with
    most batches. A rank without data left gets empty batches, shape `(0, ...)`, which have no
    weight in statistics and losses; its forward and backward passes, DistributedDataParallel's
    included, communicate as before. DistributedDataParallel's own join does not support
    synchronized layers. Without DistributedDataParallel, call `average_gradients` before the
    optimizer's step. The `with` is only needed if a rank may leave the loop early.

    Parameters
    ----------
    model
        The model to train; it is not changed.
    process_group
        The ranks that take part, as in `check_sync`.
    empty
        Returns an empty batch like its argument, a batch. Default: the first dimension of every
        tensor in the batch, in tuples, lists and dictionaries too, becomes 0; numbers and texts are
        kept; other objects raise TypeError.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `check_sync` for `process_group`, and as `Joined` in the loop. RuntimeError on all ranks
        at the end of the context, if some left the loop while others had batches; all ranks may
        leave it in the same step.

    Notes
    -----
    A rank that raises in the body of the loop cannot tell the others, which may wait for it: let
    the launcher end them. The model must accept an empty batch: `x.flatten(1)` does,
    `x.view(len(x), -1)` raises.

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
    """The tensors of a batch, in order, also in tuples, lists and mappings.

    Of a PackedSequence, the first step, which has all its samples on the first axis.
    """
    if isinstance(batch, PackedSequence):
        batch = batch.data[: batch.batch_sizes[0]]
    if isinstance(batch, (list, tuple, MutableMapping)):
        parts = batch.values() if isinstance(batch, MutableMapping) else batch
        return [t for part in parts for t in tensors_in(part)]
    return [batch] if isinstance(batch, Tensor) else []


def _copy_batch(placeholder: Any) -> Any:
    """A placeholder that the body of a loop may change."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    with suppress(TypeError):  # of a class that cannot be made anew
        return _map_leaves(copy_leaf, placeholder)
    return placeholder


def _map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """`batch` with all that is in its tuples, lists and mappings replaced by `function` of it."""
    if isinstance(batch, MutableMapping):
        parts = {k: _map_leaves(function, v) for k, v in batch.items()}
        # A shallow copy of a class that wraps a dictionary may have the same dictionary.
        is_plain = isinstance(batch, (dict, UserDict))
        mapping = copy.copy(batch) if is_plain else copy.deepcopy(batch)
        mapping.update(parts)
        return mapping
    if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
        items = [_map_leaves(function, item) for item in batch]
        try:
            return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
        except TypeError as error:  # of a constructor of its own
            raise _cannot_empty(
                "use list and tuple types that can be constructed from an iterable", batch
            ) from error
    return function(batch)
