"""Loops over the ranks' own batches that proceed step by step together, until all have run out.

Collective operations in the body of such a loop meet every rank: a rank that has no batch left
takes part with an empty one.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multibn._typing import Array
from multibn.communicators import Communicator
from multibn.communicators.objects import broadcast_object

#: `Step.batch` on a rank that has no batch left.
END: Any = object()


class Step(NamedTuple):
    """One step of a `Lockstep`."""

    batch: Any  # this rank's, or `END`
    occupied: npt.NDArray[np.bool_]  # which ranks have a batch
    amount: int  # sum over the ranks' batches


class _State(IntEnum):
    """The number by which a rank tells the others how it stands."""

    OUT = 0  # no batch left
    BATCH = 1
    FAILED = 2  # its iterator raised
    GONE = 3  # it has left the loop


class Lockstep(Iterator[Step]):
    """Steps of this rank, as many as the rank with most batches has.

    Each `next` is collective: one allreduce of W+1 numbers for W ranks. The first `next` makes the
    iterator of `batches`, which error messages call `source`; `amount` says how much a batch adds
    to `Step.amount`. The first `next` raises ValueError on all ranks if none has a batch. Other
    ranks raise RuntimeError if `batches` or `amount` raises on one rank; all do, in `next` or
    `leave`, if one rank leaves while another has a batch.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        communicator: Communicator,
        *,
        source: str,
        amount: Callable[[Any], int] | None = None,
    ) -> None:
        # `chain` makes the iterator in the first step, which tells the other ranks of an error, and
        # does not ask the iterator again after its end.
        self._batches = itertools.chain.from_iterable([batches])
        self._communicator = communicator
        self._source = source
        self._amount = amount
        self._has_begun = self._is_over = False

    def __next__(self) -> Step:
        if self._is_over:
            raise StopIteration
        batch, amount, error = END, 0, None
        try:
            batch = next(self._batches, END)
            if batch is not END and self._amount is not None:
                amount = self._amount(batch)
        except Exception as e:
            error = e
        self._is_over = True  # until the exchange below shows a batch
        state = _State.OUT if batch is END else _State.BATCH
        occupied, total = self._exchange(state, amount, error=error)
        if occupied.any():
            self._has_begun, self._is_over = True, False
            return Step(batch, occupied, total)
        if not self._has_begun:
            raise ValueError(
                f"there must be at least one batch: got none on any of {len(occupied)} rank(s) "
                f"from {self._source}. An iterator can be used once only; pass the iterable that "
                "it came from."
            )
        raise StopIteration

    def leave(self) -> None:
        """Tell the other ranks in their next `next` or `leave` that this rank takes no more steps.

        Collective, unless all ranks have run out of batches.
        """
        if not self._is_over:
            self._is_over = True
            self._exchange(_State.GONE)

    def _exchange(
        self, state: _State, amount: int = 0, *, error: Exception | None = None
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Which ranks have a batch, and the sum of their amounts. Raises as the class says."""
        rank, size = self._communicator.rank, self._communicator.size
        message = np.zeros(size + 1)
        message[rank] = state if error is None else _State.FAILED
        message[-1] = amount
        *states, total = self._communicator.allreduce(message)
        failed, gone, occupied = (
            np.equal(states, s) for s in (_State.FAILED, _State.GONE, _State.BATCH)
        )
        if error is not None:
            raise error
        if failed.any():
            raise RuntimeError(
                f"rank {rank} cannot go on: {self._source} raised on rank(s) "
                f"{np.flatnonzero(failed).tolist()} of {size}. The error raised there says why."
            )
        if gone.any() and occupied.any():
            raise RuntimeError(
                f"rank {rank} cannot go on: rank(s) {np.flatnonzero(gone).tolist()} of {size} left "
                "the loop before it ended, and others have batches. Leave it on all ranks in the "
                "same step, or on none."
            )
        return occupied, int(total)


class Joined:
    """Loops over uneven data, in step, and the losses for them; `join` returns one.

    Attributes
    ----------
    communicator
        The ranks that proceed together.
    absent
        Whether this rank has a stand-in in the present step, because it has no batch left.
    """

    def __init__(
        self,
        communicator: Communicator,
        stand_in: Callable[[Any], Any],
        portable: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.communicator = communicator
        self.absent = False
        self._stand_in = stand_in
        self._portable = portable  # gives a batch the form in which it is pickled for another rank
        self._steps: Lockstep | None = None

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, then stand-ins for as long as another rank has any.

        Each step is collective: one allreduce of W+1 numbers for W ranks, and two more in the first
        step if a rank has no batch at all and must be sent a stand-in. Another loop may follow
        after the end of this one.

        Parameters
        ----------
        batches
            This rank's data, any number of batches.

        Raises
        ------
        TypeError
            If no stand-in can be made of a batch, or no stand-in can be sent to another rank.
        ValueError
            On all ranks, if no rank has a batch.
        RuntimeError
            On the other ranks, if one rank's iterator raised; on all ranks, if some left the loop
            while others had batches.
        """
        self.leave()
        stand_in: list[Any] = []  # empty until the first batch

        def watched() -> Iterator[Any]:
            for batch in batches:
                if not stand_in:  # inside the iterator: Lockstep tells the other ranks of an error
                    stand_in.append(self._stand_in(batch))
                yield batch

        self._steps = Lockstep(watched(), self.communicator, source="the iterator of the batches")
        return self._run(self._steps, stand_in)

    def leave(self) -> None:
        """End a loop that was left by `break`: no error if all ranks left in the same step."""
        self.absent = False
        if self._steps is not None:
            self._steps.leave()

    def mean(self, losses: Array) -> Any:
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
        return losses.sum() * self.scale(math.prod(losses.shape))

    def scale(self, count: int) -> float:
        """The factor of a sum over `count` local values, for gradients that are averaged.

        The mean over ranks of the scaled sums is the mean of all ranks' values; stand-ins do not
        count. Collective: one allreduce of one number.
        """
        count = 0 if self.absent else count
        total = self.communicator.allreduce(np.array([count], dtype=np.float64))
        return 0.0 if self.absent else self.communicator.size / max(float(total[0]), 1.0)

    def _run(self, steps: Lockstep, stand_in: list[Any]) -> Iterator[Any]:
        for number, step in enumerate(steps):
            if number == 0 and not step.occupied.all():
                root = int(step.occupied.argmax())
                mine = self._portable(stand_in[0]) if self.communicator.rank == root else None
                theirs = broadcast_object(mine, self.communicator, root=root)
                stand_in = stand_in or [theirs]
            self.absent = step.batch is END
            yield stand_in[0] if self.absent else step.batch
        self.absent = False


def shortened(
    batch: Any, shorten: Callable[[Any], Any], array_types: Any, *, otherwise: str
) -> Any:
    """`batch` with each array replaced by `shorten` of it, also in tuples, lists and mappings.

    Raises TypeError, with a message that ends with `otherwise`, if no array in `batch` has a first
    axis.
    """
    arrays = []

    def visit(x: Any) -> Any:
        if x.ndim == 0:
            return x
        arrays.append(x)
        return shorten(x)

    result = map_arrays(visit, batch, array_types)
    if not arrays:
        raise TypeError(
            "a batch must have an array in it, with the samples on its first axis: got "
            f"{type(batch).__qualname__}. {otherwise}"
        )
    return result


def map_arrays(function: Callable[[Any], Any], batch: Any, array_types: Any) -> Any:
    """`batch` with each array replaced by `function` of it."""
    if isinstance(batch, array_types):
        return function(batch)
    if isinstance(batch, MutableMapping):
        mapping = copy.copy(batch)
        mapping.update({k: map_arrays(function, v, array_types) for k, v in batch.items()})
        return mapping
    if isinstance(batch, (list, tuple)):
        items = [map_arrays(function, item, array_types) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
