"""What a GPU has summed, copied to pinned memory, at which the host looks later."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from array_api_compat import is_cupy_array

from multibn._arrays import to_host
from multibn._typing import Array
from multibn.communicators.channel import HostArray


def is_captured(x: Array, /) -> bool:
    """Whether a CUDA graph captures what is done with `x`, in which no copy can be looked at."""
    if getattr(x, "is_cuda", False):  # torch's
        cuda, device = sys.modules["torch"].cuda, x.get_device()
        if device == cuda.current_device():
            return bool(cuda.is_current_stream_capturing())
        with cuda.device(device):
            return bool(cuda.is_current_stream_capturing())
    if is_cupy_array(x):
        import cupy

        return bool(cupy.cuda.get_current_stream().is_capturing())
    return False


def stream_of(x: Array, /) -> Any:
    """The current stream of the GPU of `x`; 0 for other arrays."""
    if getattr(x, "is_cuda", False):
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
    if is_cupy_array(x):
        import cupy

        return cupy.cuda.get_current_stream().ptr
    return 0


def on_stream(stream: Any, x: Array, /) -> AbstractContextManager[Any]:
    """Context in which `stream` is the current one."""
    if stream == stream_of(x):
        return nullcontext()
    if getattr(x, "is_cuda", False):
        cuda = sys.modules["torch"].cuda
        external: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(stream, x.device))
        return external
    import cupy

    return cupy.cuda.ExternalStream(stream)


def begin_copy(x: Array, unused: dict[Any, list[Any]]) -> Callable[[], HostArray]:
    """Begin to copy an array of a GPU, in the current stream, and return what waits for the copy.

    What that returns stays valid until the next copy begins. `unused` keeps memory and events, for
    arrays of each device and length, that no copy uses.
    """
    again: list[Any] = []
    if getattr(x, "is_cuda", False):
        import torch

        # An event is of the GPU on which it was recorded first.
        again = unused.setdefault((x.device, x.shape), again)
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
    elif is_cupy_array(x):
        import cupy
        import cupyx

        copy, event = cupyx.empty_pinned(x.shape, x.dtype), cupy.cuda.Event()
        pinned = copy, event
        x.get(out=copy, blocking=False)
        event.record()
    else:
        copied = to_host(x)
        return lambda: copied

    def wait() -> HostArray:
        event.synchronize()
        again.append(pinned)
        return copy

    return wait
