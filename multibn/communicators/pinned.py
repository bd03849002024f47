"""Copies of a GPU's messages, which the host looks at later."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from array_api_compat import is_cupy_array

from multibn._arrays import to_host
from multibn._typing import Array
from multibn.communicators.channel import HostArray


def begin_copy(
    summed: Array, unused: dict[Any, list[Any]]
) -> Callable[[], HostArray | None] | None:
    """Begin to copy a message from a GPU, and return what waits for the copy.

    None while a CUDA graph is captured, in which no copy can be looked at, and no event waited for:
    what waits returns None then. What it returns otherwise stays valid until the next copy begins.
    `unused` keeps memory and events, for messages of each device and length, that no copy uses.
    """
    capturing: Callable[[], bool]
    again: list[Any] = []
    if getattr(summed, "is_cuda", False):  # torch's
        import torch

        device = summed.get_device()
        is_current = device == torch.cuda.current_device()

        def capturing() -> bool:  # on the message's GPU, which may be another one
            with nullcontext() if is_current else torch.cuda.device(device):
                return torch.cuda.is_current_stream_capturing()

        if capturing():
            return None
        # An event is of the GPU on which it was recorded first.
        again = unused.setdefault((summed.device, summed.shape), again)
        if again:
            pinned = again.pop()
        else:
            with torch.inference_mode(False):  # else no copy in training could be written to it
                options: Any = {"dtype": summed.dtype, "device": "cpu", "pin_memory": True}
                memory = torch.empty(summed.shape, **options)
            # torch.cuda.Event looks the current stream up in Python.
            pinned = memory, memory.numpy(), torch.Event(summed.device)
        memory, copy, event = pinned
        memory.copy_(summed, non_blocking=True)
        event.record(None if is_current else torch.cuda.current_stream(summed.device))
    elif is_cupy_array(summed):
        import cupy
        import cupyx

        def capturing() -> bool:
            return bool(cupy.cuda.get_current_stream().is_capturing())

        if capturing():
            return None
        copy, event = cupyx.empty_pinned(summed.shape, summed.dtype), cupy.cuda.Event()
        pinned = copy, event
        summed.get(out=copy, blocking=False)
        event.record()
    else:
        copied = to_host(summed)
        return lambda: copied

    def wait() -> HostArray | None:
        if capturing():
            return None
        event.synchronize()
        again.append(pinned)
        return copy

    return wait
