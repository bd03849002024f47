"""Training on uneven data: ranks without data left take part with empty batches."""

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from multibn.communicators import Communicator, CommunicatorLike
from multibn.communicators.handshake import allreduce_at
from multibn.engine.lockstep import END, Lockstep
from multibn.torch_backend.train.synchrony import participants


class Joined:
    """Loops over uneven data, in step, and the losses for them; `join` returns one.

    Attributes
    ----------
    communicator
        The ranks that proceed together.
    absent
        Whether this rank has a stand-in in the present step, because it has no batch left.
    """

    def __init__(self, communicator: Communicator, stand_in: Callable[[Any], Any]) -> None:
        self.communicator = communicator
        self.absent = False
        self._stand_in = stand_in
        self._steps: Lockstep | None = None

    def __enter__(self) -> "Joined":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an exception the other ranks may be in another collective
            self.leave()

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, then stand-ins for as long as another rank has any.

        Each step is collective: one allreduce of W+1 numbers for W ranks. Another loop may follow
        after the end of this one.

        Parameters
        ----------
        batches
            This rank's data, any number of batches.

        Raises
        ------
        TypeError
            If no stand-in can be made of a batch.
        ValueError
            On all ranks, if a rank has no batch at all, of which a stand-in could be made.
        RuntimeError
            On the other ranks, if one rank's iterator raised; on all ranks, if some left the loop
            while others had batches.
        """
        self.leave()
        stand_in: list[Any] = []  # empty until the first batch

        def note(batch: Any) -> int:  # called by Lockstep, which tells the other ranks of an error
            if not stand_in:
                stand_in.append(self._stand_in(batch))
            return 0

        self._steps = Lockstep(
            batches,
            self.communicator,
            source="the iterator of the batches",
            place="a step of join",
            amount=note,
            everywhere=True,
        )
        for step in self._steps:
            self.absent = step.batch is END
            yield stand_in[0] if self.absent else step.batch
        self.absent = False

    def leave(self) -> None:
        """End a loop that was left by `break`: no error if all ranks left in the same step."""
        self.absent = False
        if self._steps is not None:
            self._steps.leave()

    def mean(self, losses: Tensor) -> Tensor:
        """This rank's part of the mean of all ranks' losses, of shape `()`; 0 for a stand-in.

        The average of this part over the ranks, and of its gradient as DistributedDataParallel and
        `average_gradients` compute it, is exactly the mean over all elements of all ranks, and its
        gradient. Collective: every rank must call this method in each step; one allreduce of one
        number.

        Parameters
        ----------
        losses
            One number for each sample, pixel..., of any shape but `()`: pass `reduction="none"` to
            the loss function.

        Raises
        ------
        ValueError
            If `losses` is a single number, so already reduced.
        """
        if losses.ndim == 0:
            raise ValueError(
                "`losses` must have a number for each sample: got shape (), which is reduced "
                'already. Pass reduction="none" to the loss function.'
            )
        count = 0 if self.absent else losses.numel()
        counts = np.array([count], dtype=np.float64)
        total = allreduce_at(self.communicator, counts, "the mean of join's losses")
        factor = 0.0 if self.absent else self.communicator.size / max(float(total[0]), 1.0)
        return losses.sum() * factor


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
    optimizer's step. A loop that no rank leaves before its end needs no `with`.

    Parameters
    ----------
    model
        The model to train; it is not changed.
    process_group
        The ranks that take part, as in `check_sync`.
    empty
        Returns an empty batch like its argument, a batch. Default: the first dimension of every
        tensor in the batch, in tuples, lists and dictionaries too, becomes 0; numbers and texts
        stay, and other objects are a TypeError.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        For `process_group` as `check_sync`, in the loop as `Joined`. At the end of
        the context RuntimeError on all ranks, if some left the loop while others had batches. All
        ranks may leave the loop in the same step.

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
    return Joined(participants(model, process_group), _empty if empty is None else empty)


def _empty(batch: Any) -> Any:
    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.new_empty((0, *leaf.shape[1:])) if leaf.ndim else leaf
        if isinstance(leaf, (str, bytes, Number, type(None))):
            return leaf
        raise _not_emptied("no other object that may hold samples", leaf)

    if not any(t.ndim for t in tensors_in(batch)):
        raise _not_emptied("a tensor in it, with the samples on its first axis", batch)
    return _map_leaves(empty, batch)


def _not_emptied(wanted: str, got: Any) -> TypeError:
    return TypeError(
        f"a batch must have {wanted}: got {type(got).__qualname__}. Pass `empty`, a function that "
        "returns an empty batch like its argument."
    )


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order, also in tuples, lists and mappings.

    Of a PackedSequence, the first step, which has all its samples on the first axis.
    """
    leaves: list[Any] = []

    def note(leaf: Any) -> None:
        is_packed = isinstance(leaf, PackedSequence)
        leaves.append(leaf.data[: leaf.batch_sizes[0]] if is_packed else leaf)

    _map_leaves(note, batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """`batch` with all that is in its tuples, lists and mappings replaced by `function` of it."""
    if isinstance(batch, MutableMapping):
        mapping = copy.copy(batch)
        mapping.update({k: _map_leaves(function, v) for k, v in batch.items()})
        return mapping
    if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
        items = [_map_leaves(function, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return function(batch)
