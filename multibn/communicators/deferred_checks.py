"""Deferred checks: GPU messages are copied to the host, and checked about a step later."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from multibn import wire
from multibn._arrays import array_namespace, on_device_of, to_host
from multibn._typing import Array, HostArray

# The kind of a message of compiled code, which may be in the memory of a CUDA graph: torch forbids
# keeping tensors there, or views of them.
IN_GRAPH_MEMORY: Any = "copied"


class DeferredChecks:
    """The messages of a group that are not checked yet."""

    def __init__(self) -> None:
        # The latest ones, and those before them, whose copies are under way.
        self._unread: list[PendingMessage] = []
        self._arriving: list[_Copy] = []
        self._pinned: dict[Any, list[Any]] = {}
        # Check this many messages at once: about half a step's, so that their copies have arrived,
        # and not fewer than 4, for a layer called several times in a row.
        self.batch_size = 4

    def add(self, message: "PendingMessage") -> None:
        """Add a summed GPU message, which is checked about a step later."""
        if message.kind is IN_GRAPH_MEMORY:
            message = message._replace(numbers=begin_copy(message.numbers, self._pinned))
        self._unread.append(message)

    def check_if_due(self, kind: object = None) -> None:
        """Check messages of long ago, before one of this kind. Raises on all ranks if it raises.

        A group's messages have one order on all ranks, which raise at the same moment.
        """
        if len(self._unread) >= self.batch_size:
            self._send(kind)

    def flush(self) -> None:
        """Check all messages that GPUs have summed."""
        self._send()
        self._receive()

    def _send(self, kind: object = None) -> None:
        """Check the messages already copied, then begin to copy the others."""
        self._receive()
        groups: dict[Any, list[PendingMessage]] = {}
        for each in self._unread:
            groups.setdefault(each.kind, []).append(each)
        self._unread = []
        for of_kind, sent in groups.items():
            if of_kind is IN_GRAPH_MEMORY:
                self._arriving.append(_Copy(sent, [each.numbers for each in sent]))
                continue
            numbers = sent[0].numbers
            with on_device_of(numbers), on_stream(of_kind[2], numbers):
                if kind is IN_GRAPH_MEMORY:
                    waits = [begin_copy(each.numbers, self._pinned) for each in sent]
                    self._arriving.append(_Copy(sent, waits))
                    continue
                xp = array_namespace(numbers)
                every = xp.stack([each.numbers for each in sent])
                largest = xp.reshape(xp.max(xp.abs(every)), (1,))
                told = xp.concat([xp.reshape(every[:, : wire.HEAD], (-1,)), largest])
                self._arriving.append(_Copy(sent, every, begin_copy(told, self._pinned)))

    def _receive(self) -> None:
        """Look at the messages whose copies are under way; at each if anything is unusual."""
        copies, self._arriving = self._arriving, []
        try:
            for copy in copies:
                copy.look()
        except Exception:
            self._unread.clear()  # what follows an error says nothing new
            raise


class PendingMessage(NamedTuple):
    """A message that a GPU has summed."""

    phase: Callable[[], Any]  # weak: the group's messages keep no model alive
    call: int
    numbers: Any  # an array, or what waits for a copy
    expected: Sequence[float]  # of the head
    kind: Any  # shape, device and stream, or IN_GRAPH_MEMORY


class _Copy(NamedTuple):
    """Messages of one kind on their way to the host.

    Each by a copy of its own; or in one array on the GPU, of which their heads and largest number
    are on their way.
    """

    messages: list[PendingMessage]
    numbers: Any
    wait: Callable[[], HostArray] | None = None

    def look(self) -> None:
        """Look at the messages; one by one if anything is unusual."""
        if self.wait is not None:
            *heads, largest = self.wait().tolist()
            expected = [v for each in self.messages for v in each.expected]
            if largest < wire.LARGEST_SUM and heads == expected:
                return
        for each, numbers in zip(self.messages, self.numbers, strict=True):
            summed = numbers() if self.wait is None else to_host(numbers)
            is_usual = summed[: wire.HEAD].tolist() == each.expected
            if is_usual and np.abs(summed).max() < wire.LARGEST_SUM:
                continue
            phase = each.phase()
            if phase is not None:
                phase.check(summed, each.call)


def is_captured(x: Array, /) -> bool:
    """Whether a CUDA graph is being captured on the GPU of `x`: nothing may wait for the host."""
    if getattr(x, "is_cuda", False):  # torch's
        cuda, device = sys.modules["torch"].cuda, x.get_device()
        if device == cuda.current_device():
            return bool(cuda.is_current_stream_capturing())
        with cuda.device(device):
            return bool(cuda.is_current_stream_capturing())
    return False


def stream_of(x: Array, /) -> Any:
    """The current stream of the GPU of a torch tensor; 0 for other arrays."""
    if getattr(x, "is_cuda", False):
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
    return 0


def on_stream(stream: Any, x: Array, /) -> AbstractContextManager[Any]:
    """Context in which `stream` is the current one."""
    if stream == stream_of(x):
        return nullcontext()
    cuda = sys.modules["torch"].cuda
    external: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(stream, x.device))
    return external


def begin_copy(x: Array, unused: dict[Any, list[Any]]) -> Callable[[], HostArray]:
    """Begin to copy a torch tensor from its GPU, and return a function that waits for the copy.

    The array that it returns stays valid until the next copy begins. `unused` keeps memory and
    events of each device and length for later copies. CuPy's arrays are copied at once.
    """
    if not getattr(x, "is_cuda", False):  # CuPy's
        copied = to_host(x)
        return lambda: copied
    import torch

    # An event is of the GPU on which it was recorded first.
    again: list[Any] = unused.setdefault((x.device, x.shape), [])
    if again:
        pinned = again.pop()
    else:
        with torch.inference_mode(False):  # else no copy in training could be written to it
            options: Any = {"dtype": x.dtype, "device": "cpu", "pin_memory": True}
            memory = torch.empty(x.shape, **options)
        pinned = memory, memory.numpy(), torch.Event(x.device)
    memory, copy, event = pinned
    memory.copy_(x, non_blocking=True)
    # torch.cuda.current_stream takes longer than the copy.
    is_current = x.get_device() == torch.cuda.current_device()
    event.record(None if is_current else torch.cuda.current_stream(x.device))

    def wait() -> HostArray:
        event.synchronize()
        again.append(pinned)
        return copy

    return wait
