"""Reuse the batch statistics of a first pass when the pass is recomputed.

An activation-checkpointed or reversible block runs its forward pass twice. In the first pass,
`recording` puts each layer's batch statistics on a tape of this one call. In the second pass,
`replaying` returns them in the same order. So the second pass communicates nothing, updates
nothing, and computes bitwise the same numbers as the first.

The two contexts may be nested in any way: an inner checkpoint records again while the outer one
replays. A context is active only in the thread that enters it.
"""

import threading
from typing import Any, TypeAlias

from multibn.engine.statistics import BatchStatistics
from multibn.kernels import NormArgs

# The batch statistics of one forward pass, in the order of its layers.
Tape: TypeAlias = list[BatchStatistics]


class StatisticsTape:
    """A context manager that fills a tape; it is on its thread's stack while it is entered."""

    def __init__(self) -> None:
        self.tape: Any = []

    def __enter__(self) -> Any:
        state.stack.append(self)
        return self.tape

    def __exit__(self, *exception: object) -> None:
        state.stack.remove(self)

    def keep(self, batch: BatchStatistics, args: NormArgs | None, plan: Any) -> None:
        """Put the statistics of `args`, computed by `plan`, on the tape."""
        self.tape.append(batch)


class recording(StatisticsTape):  # noqa: N801 (read as a verb: `with recording() as tape`)
    """Context manager for a first pass; yields the tape, a list that the pass fills.

    Examples
    --------
    >>> import torch
    >>> from multibn.engine import recording
    >>> from multibn.torch import SyncBatchNorm
    >>> layer = SyncBatchNorm(1)
    >>> with recording() as tape:
    ...     y = layer(torch.tensor([[1.0], [3.0]]))
    >>> tape[0].mean
    tensor([2.], dtype=torch.float64)
    """


class replaying(StatisticsTape):  # noqa: N801
    """Context manager for a recomputed pass, which reuses the statistics on `tape`.

    The context can be entered more than once; each time, the tape starts from its beginning.

    Raises
    ------
    RuntimeError
        If the pass runs more batch norms than the first pass, or batch norms with other channels;
        on leaving the context without an exception, if the pass has run fewer.

    Examples
    --------
    >>> import torch
    >>> from multibn.engine import recording, replaying
    >>> from multibn.torch import SyncBatchNorm
    >>> layer, x = SyncBatchNorm(8), torch.randn(4, 8)
    >>> with recording() as tape:
    ...     y = layer(x)
    >>> with replaying(tape):
    ...     again = layer(x)
    >>> torch.equal(y, again), layer.num_batches_tracked  # the batch counts once
    (True, tensor(1))
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> Tape:
        self.position = 0
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        # torch.utils.checkpoint ends a pass early, by an exception, when it has recomputed all the
        # tensors that it needs.
        if not any(exception) and self.position < len(self.tape):
            raise RuntimeError(
                f"the recomputation ran {self.position} of the {len(self.tape)} batch norms of "
                "the first pass. A recomputed block must run the same layers both times: call "
                "train() or eval() only after the backward pass."
            )

    def next(self, channels: tuple[int, ...]) -> BatchStatistics:
        """Return the next statistics on the tape, which must have shape `channels`."""
        n = self.position
        of_first = tuple(self.tape[n].mean.shape) if n < len(self.tape) else "none"
        if of_first != channels:
            raise RuntimeError(
                f"batch norm {n + 1} of the recomputation has channels {channels} where the first "
                f"pass had {of_first}. A recomputed block must run the same layers both times."
            )
        self.position += 1
        return self.tape[n]


def is_recording() -> bool:
    """Return whether this pass, which runs without gradients, is recomputed in backward."""
    return any(isinstance(entered, recording) for entered in state.stack)


def in_recomputing() -> bool:
    """Return whether this pass is a recomputation, which must not update running statistics."""
    return any(isinstance(entered, replaying) for entered in state.stack)


def replayed(channels: tuple[int, ...]) -> BatchStatistics | None:
    """Return the next statistics of the innermost replay; None if there is no replay.

    Tapes that record inside that replay get the statistics, too.
    """
    for current in reversed(state.stack):
        if isinstance(current, replaying):
            batch = current.next(channels)
            record(batch)
            return batch
    return None


def record(batch: BatchStatistics, args: NormArgs | None = None, plan: Any = None) -> None:
    """Put statistics on all tapes of this thread, but none outside the innermost replay.

    `args` is None in a recomputed pass.
    """
    for current in reversed(state.stack):
        if isinstance(current, replaying):
            break
        current.keep(batch, args, plan)


class _State(threading.local):
    def __init__(self) -> None:
        self.stack: list[StatisticsTape] = []


state = _State()  # one stack per thread; empty if no context is active
