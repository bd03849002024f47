"""Loops over the ranks' own batches that proceed in step until every rank has run out.

Every rank reaches the collective operations in the loop's body: a rank without a batch left gets
`END`, and its caller makes an empty batch.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multibn.communicators import Communicator
from multibn.communicators.channel import at

#: `Step.batch` on a rank that has no batch left.
END: Any = object()


class Step(NamedTuple):
    """One step of a `Lockstep`."""

    batch: Any  # of this rank, or `END`
    total_size: int  # sum of `size_of(batch)` over the ranks; 0 without `size_of`


class _State(IntEnum):
    """The state of a rank, as sent to the other ranks."""

    OUT = 0  # no batch left
    BATCH = 1
    FAILED = 2  # its iterator raised
    GONE = 3  # it has left the loop


class Lockstep(Iterator[Step]):
    """Steps of this rank, as many as the rank with the most batches has.

    Each `next` is collective: one allreduce of W+1 numbers for W ranks. The first `next` makes the
    iterator of `batches`. `source` and `place` are the names of the data and of a step in error
    messages.

    The first `next` raises ValueError on all ranks if none has a batch or, with `everywhere`, if
    one has none. If `batches` or `size_of` raises on one rank, that rank raises the error, and all
    others RuntimeError. If a rank leaves while another has a batch, all ranks raise RuntimeError,
    in `next` or `leave`.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        communicator: Communicator,
        *,
        source: str,
        place: str,
        size_of: Callable[[Any], int] | None = None,
        everywhere: bool = False,
    ) -> None:
        self._batches = _with_sizes(batches, size_of)
        self._communicator = communicator
        self._source, self._place = source, place
        self._everywhere = everywhere
        self._has_begun = self._is_over = False

    def __next__(self) -> Step:
        if self._is_over:
            raise StopIteration
        batch, batch_size, error = END, 0, None
        try:
            batch, batch_size = next(self._batches, (END, 0))
        except Exception as e:
            error = e
        self._is_over = True  # until the exchange below shows a batch
        state = _State.OUT if batch is END else _State.BATCH
        has_batch, total = self._exchange(state, batch_size, error=error)
        if not self._has_begun and not (has_batch.all() if self._everywhere else has_batch.any()):
            raise ValueError(
                f"there must be at least one batch{' on every rank' if self._everywhere else ''}: "
                f"got none on rank(s) {np.flatnonzero(~has_batch).tolist()} of {len(has_batch)} "
                f"from {self._source}. Use fewer ranks. If you passed an iterator, it may be "
                "exhausted: pass the iterable that it came from."
            )
        if not has_batch.any():
            raise StopIteration
        self._has_begun, self._is_over = True, False
        return Step(batch, total)

    def leave(self) -> None:
        """Tell the other ranks in their next `next` or `leave` that this rank takes no more steps.

        Collective, unless the loop is over: all ranks have run out of batches, this rank has left,
        or a `next` has raised.
        """
        if not self._is_over:
            self._is_over = True
            self._exchange(_State.GONE)

    def _exchange(
        self, state: _State, batch_size: int = 0, *, error: Exception | None = None
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Return which ranks have a batch, and the sum of the sizes. Raises as the class says."""
        rank, size = self._communicator.rank, self._communicator.size
        message = np.zeros(size + 1)
        message[rank] = state if error is None else _State.FAILED
        message[-1] = batch_size
        summed = at(self._communicator, self._place).allreduce(message)
        states, total = summed[:-1], int(summed[-1])
        has_batch, gone = states == _State.BATCH, np.flatnonzero(states == _State.GONE)
        if error is not None:
            raise error
        if (failed := np.flatnonzero(states == _State.FAILED)).size:
            raise RuntimeError(
                f"{self._source} raised on rank(s) {failed.tolist()} of {size}. See the error "
                "there."
            )
        if gone.size and has_batch.any():
            raise RuntimeError(
                f"rank(s) {gone.tolist()} of {size} left the loop early, while other ranks still "
                "have batches. Leave it on all ranks in the same step."
            )
        return has_batch, total


def _with_sizes(
    batches: Iterable[Any], size_of: Callable[[Any], int] | None
) -> Iterator[tuple[Any, int]]:
    """Yield each batch and its size.

    As a generator, it calls iter() in the first `next`, so that the other ranks see an error, and
    turns a StopIteration of `size_of`, which would end this rank's loop alone, into RuntimeError.
    """
    for batch in batches:
        yield batch, 0 if size_of is None else size_of(batch)
