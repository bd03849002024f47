"""Batch statistics of a first pass, reused when the pass runs again.

An activation-checkpointed or reversible block runs its forward pass twice. In the first pass,
`recording` puts each layer's batch statistics on a tape of this one call; in the second pass
`replaying` returns them in the same order. So the second pass communicates nothing, updates
nothing, and computes the numbers of the first bit for bit.

The two contexts may be nested in any way: a checkpoint inside a checkpoint records anew while the
outer one replays. A context is in force in the thread that enters it.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from multibn import kernels
from multibn._arrays import values
from multibn.communicators.conversation import Conversation
from multibn.engine import masks
from multibn.engine.statistics import BatchStatistics, sizes
from multibn.kernels import Input, generic, generic_passes


class Tape:
    """The batch statistics of one forward pass, in the order of its layers."""

    def __init__(self) -> None:
        self.entries: list[BatchStatistics] = []


class Taping:
    """A context manager that is on its thread's stack from enter to exit, and fills a tape."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape

    def __enter__(self) -> Any:
        state.stack.append(self)
        return self.tape

    def __exit__(self, *exception: object) -> None:
        state.stack.remove(self)

    def keep(
        self, batches: Sequence[BatchStatistics], inputs: Sequence[Input], communicator: Any
    ) -> None:
        """Put the statistics of a message's inputs on the tape."""
        self.tape.entries += batches


class recording(Taping):  # noqa: N801 (read as a verb: `with recording() as tape`)
    """Context manager for a first pass; yields the `Tape` that the pass fills.

    Examples
    --------
    >>> import torch
    >>> from multibn.engine import recording
    >>> from multibn.torch_backend import SyncBatchNorm
    >>> layer = SyncBatchNorm(1)
    >>> with recording() as tape:
    ...     y = layer(torch.tensor([[1.0], [3.0]]))
    >>> tape.entries[0].mean
    tensor([2.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        super().__init__(Tape())


class LayerStatistics(NamedTuple):
    """The batch statistics of a layer in one forward pass.

    Attributes
    ----------
    path
        The layer's name in the model's state dict.
    batch, own
        Mean, biased variance and count, over all ranks and of this rank alone.

    Examples
    --------
    >>> import torch
    >>> from multibn import observing
    >>> from multibn.torch_backend import SyncBatchNorm
    >>> with observing() as seen:
    ...     y = torch.nn.Sequential(SyncBatchNorm(1))(torch.tensor([[1.0], [3.0]]))
    >>> seen[0].path, seen[0].own.mean
    ('0', tensor([2.], dtype=torch.float64))
    """

    path: str
    batch: BatchStatistics
    own: BatchStatistics


class observing(Taping):  # noqa: N801
    """Context manager for those who study batch statistics; yields a list of `LayerStatistics`.

    Each call of a layer in training adds one; a pass that runs again adds none. The splits of a
    batch are a further axis, or entries of their own where they count unequal numbers of elements;
    a batch of torch.func.vmap is a further axis. The list keeps no activation. A layer sends what
    it sends without the context, and computes this rank's moments once more. Not collective.

    Examples
    --------
    >>> import torch
    >>> from multibn import observing
    >>> from multibn.torch_backend import SyncBatchNorm
    >>> layer = SyncBatchNorm(1)
    >>> with observing() as seen:
    ...     y = layer(torch.tensor([[1.0], [3.0]]))
    >>> seen[0].path, seen[0].batch.var, seen[0].batch.count.item()
    ('SyncBatchNorm', tensor([1.], dtype=torch.float64), 2.0)
    """

    def __init__(self) -> None:
        super().__init__([])

    def keep(
        self, batches: Sequence[BatchStatistics], inputs: Sequence[Input], communicator: Any
    ) -> None:
        while not isinstance(communicator, Conversation) and hasattr(communicator, "wrapped"):
            communicator = communicator.wrapped
        names: Sequence[str] = ["a layer"]
        if isinstance(communicator, Conversation):
            names = communicator.names or [communicator.name]
        names = [*names] * (len(inputs) // len(names))  # splits of one layer share a message, too
        for name, batch, i in zip(names, batches, inputs, strict=bool(inputs)):
            own, state = _own(i)
            if state == kernels.LOST:  # beside the square of the mean
                near, centre = generic_passes.about(i, own.mean)
                own, _ = _own(near)
                own = own._replace(mean=centre + own.mean)
            pair = (BatchStatistics(*map(values, each)) for each in (batch, own))
            self.tape.append(LayerStatistics(name, *pair))


def _own(i: Input) -> tuple[BatchStatistics, int]:
    """The statistics of this rank's part of a batch, and their state, see `generic.unpack_for`."""
    _, count = masks.weigh(i, sizes(i.x.shape, i.axis)[1], "element")
    bare = Input(i.x, None, None, 0.0, i.axis, mask=i.mask)
    payload = kernels.select(i.x).begin_forward(bare, count, count)
    return generic.unpack_for(bare, payload, count, count)


class replaying(Taping):  # noqa: N801
    """Context manager for a pass that runs again, from the start of `tape`; can be entered again.

    Raises
    ------
    RuntimeError
        If the pass meets more batch norms than the first pass, or batch norms of other channels;
        on leaving the context without an exception, if the pass has met fewer.

    Examples
    --------
    >>> import torch
    >>> from multibn.engine import recording, replaying
    >>> from multibn.torch_backend import SyncBatchNorm
    >>> layer, x = SyncBatchNorm(8), torch.randn(4, 8)
    >>> with recording() as tape:
    ...     y = layer(x)
    >>> with replaying(tape):
    ...     again = layer(x)
    >>> torch.equal(y, again), layer.num_batches_tracked  # the batch counts once
    (True, tensor(1))
    """

    def __enter__(self) -> Tape:
        self.position = 0
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        # torch.utils.checkpoint ends a pass early, by an exception, when it has recomputed all the
        # tensors that it needs.
        if not any(exception) and self.position < len(self.tape.entries):
            raise RuntimeError(
                f"the recomputation has met {self.position} of the {len(self.tape.entries)} batch "
                "norms of the first pass. A recomputed block must do the same both times: switch "
                "between training and evaluation after the backward pass."
            )

    def next(self, channels: tuple[int, ...]) -> BatchStatistics:
        """The next statistics on the tape, which must have shape `channels`."""
        if self.position == len(self.tape.entries):
            raise RuntimeError(
                f"the recomputation has met more batch norms than the first pass, which had "
                f"{self.position}. A recomputed block must do the same both times."
            )
        batch = self.tape.entries[self.position]
        self.position += 1
        if tuple(batch.mean.shape) != channels:
            raise RuntimeError(
                f"batch norm {self.position} of the recomputation has channels {channels} where "
                f"the first pass had {tuple(batch.mean.shape)}. A recomputed block must do the "
                "same both times."
            )
        return batch


def is_recording() -> bool:
    """Whether this pass will run again for its gradients, although it runs without any."""
    return any(isinstance(entered, recording) for entered in state.stack)


def in_recomputing() -> bool:
    """Whether this pass runs again, so that running statistics must not be updated."""
    stack = state.stack
    return bool(stack) and any(isinstance(entered, replaying) for entered in stack)


def replayed(channels: Sequence[tuple[int, ...]]) -> list[BatchStatistics] | None:
    """The next statistics of the innermost replay, of shapes `channels`; None if nothing replays.

    All tapes that record inside of that replay get the statistics, too.
    """
    for current in reversed(state.stack):
        if isinstance(current, replaying):
            batches = [current.next(shape) for shape in channels]
            record(batches)
            return batches
    return None


def record(
    batches: Sequence[BatchStatistics], inputs: Sequence[Input] = (), communicator: Any = None
) -> None:
    """Put statistics on all tapes that record inside of the innermost replay, if any."""
    for current in reversed(state.stack):
        if isinstance(current, replaying):
            break
        current.keep(batches, inputs, communicator)


class _State(threading.local):
    def __init__(self) -> None:
        self.stack: list[Taping] = []


state = _State()  # of this thread; the stack is empty where neither of the contexts is in force
