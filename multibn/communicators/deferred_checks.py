"""Deferred checks: GPU messages are copied to the host and checked about a step later."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import numpy as np

from multibn import wire
from multibn._arrays import array_namespace, on_device_of, to_host
from multibn._typing import Array, HostArray

# The kind of messages from compiled code. Their memory may belong to a CUDA graph: torch forbids
# keeping a tensor in that memory, or a view of one.
IN_GRAPH_MEMORY: Any = "copied"


# A summed message: (array, or function that waits for its copy; expected head; function that raises
# if the message shows an error).
_Message: TypeAlias = tuple[Any, Sequence[float], Callable[[HostArray], None]]


class DeferredChecks:
    """A group's summed messages that have not been checked yet."""

    def __init__(self) -> None:
        self._pending: dict[Any, list[_Message]] = {}  # by kind; not yet copied
        # Messages that are being copied to the host: (messages, a copy of each, None), or
        # (messages, all on the GPU, function that waits for the copy of a summary). The summary has
        # all heads and the largest absolute value.
        self._in_transit: list[tuple[list[_Message], Any, Callable[[], HostArray] | None]] = []
        self._pinned: dict[Any, list[Any]] = {}
        # How many messages are checked at once: about half of a step's messages, so that their
        # copies have arrived; at least 4, for models of few layers.
        self.batch_size = 4

    def add(
        self, numbers: Any, kind: Any, expected: Sequence[float], check: Callable[[HostArray], None]
    ) -> None:
        """Add a summed GPU message, which is checked about a step later.

        The `kind` is the message's shape, device and stream, or IN_GRAPH_MEMORY.
        """
        if kind is IN_GRAPH_MEMORY:
            numbers = begin_copy(numbers, self._pinned)
        self._pending.setdefault(kind, []).append((numbers, expected, check))

    def check_if_due(self, next_kind: object = None) -> None:
        """Check earlier messages if enough are pending, before a message of the next kind is sent.

        The messages of a group have the same order on all ranks, so all ranks raise in one call.
        """
        if sum(map(len, self._pending.values())) >= self.batch_size:
            self._check_and_copy(next_kind)

    def flush(self) -> None:
        """Check all messages now."""
        self._check_and_copy()
        self._check_in_transit()

    def _check_and_copy(self, next_kind: object = None) -> None:
        """Check the messages that are being copied, then begin to copy the pending ones."""
        self._check_in_transit()
        pending, self._pending = self._pending, {}
        for kind, messages in pending.items():
            numbers: Any = [each[0] for each in messages]
            if kind is IN_GRAPH_MEMORY:
                self._in_transit.append((messages, numbers, None))
                continue
            with on_device_of(numbers[0]), on_stream(kind[2], numbers[0]):
                if next_kind is IN_GRAPH_MEMORY:
                    waits = [begin_copy(each, self._pinned) for each in numbers]
                    self._in_transit.append((messages, waits, None))
                    continue
                xp = array_namespace(numbers[0])
                stacked = xp.stack(numbers)
                largest = xp.reshape(xp.max(xp.abs(stacked)), (1,))
                summary = xp.concat([xp.reshape(stacked[:, : wire.HEAD], (-1,)), largest])
                self._in_transit.append((messages, stacked, begin_copy(summary, self._pinned)))

    def _check_in_transit(self) -> None:
        """Wait for the copies and check the summaries; if one fails, check each of its messages."""
        in_transit, self._in_transit = self._in_transit, []
        try:
            for messages, numbers, wait in in_transit:
                if wait is not None:
                    *heads, largest = wait().tolist()
                    expected = [v for each in messages for v in each[1]]
                    if largest < wire.LARGEST_SUM and heads == expected:
                        continue
                for (_, head, check), each in zip(messages, numbers, strict=True):
                    summed = each() if wait is None else to_host(each)
                    is_usual = summed[: wire.HEAD].tolist() == head
                    if not (is_usual and np.abs(summed).max() < wire.LARGEST_SUM):
                        with suppress(ReferenceError):  # the layer has been deleted
                            check(summed)
        except Exception:
            self._pending.clear()  # messages after an error would only repeat the error
            raise


def is_captured(x: Array, /) -> bool:
    """Whether a CUDA graph is being captured on the GPU of `x`, so that the host must not wait."""
    if getattr(x, "is_cuda", False):  # torch's
        cuda, device = sys.modules["torch"].cuda, x.get_device()
        if device == cuda.current_device():
            return bool(cuda.is_current_stream_capturing())
        with cuda.device(device):
            return bool(cuda.is_current_stream_capturing())
    return False


def stream_of(x: Array, /) -> Any:
    """Return the current stream of a torch tensor's GPU; 0 for other arrays."""
    if getattr(x, "is_cuda", False):
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
    return 0


def on_stream(stream: Any, x: Array, /) -> AbstractContextManager[Any]:
    """Return a context in which `stream` is the current stream."""
    if stream == stream_of(x):
        return nullcontext()
    cuda = sys.modules["torch"].cuda
    return cuda.stream(cuda.ExternalStream(stream, x.device))


def begin_copy(x: Array, unused: dict[Any, list[Any]]) -> Callable[[], HostArray]:
    """Begin to copy a torch tensor from its GPU, and return a function that waits for the copy.

    The array that this function returns stays valid until the next copy begins. `unused` holds
    pinned memory and events for later copies. CuPy's arrays are copied before the return.
    """
    if not getattr(x, "is_cuda", False):  # CuPy's
        copied = to_host(x)
        return lambda: copied
    import torch

    # An event belongs to the GPU on which it was first recorded: the key includes the device.
    free: list[Any] = unused.setdefault((x.device, x.shape), [])
    if free:
        pinned = free.pop()
    else:
        with torch.inference_mode(False):  # else torch forbids writing to the memory in training
            memory = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        pinned = memory, memory.numpy(), torch.Event(x.device)
    memory, copy, event = pinned
    memory.copy_(x, non_blocking=True)
    # Avoid torch.cuda.current_stream, which takes longer than starting the copy.
    is_current = x.get_device() == torch.cuda.current_device()
    event.record(None if is_current else torch.cuda.current_stream(x.device))

    def wait() -> HostArray:
        event.synchronize()
        free.append(pinned)
        return copy

    return wait
