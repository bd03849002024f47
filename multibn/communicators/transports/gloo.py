"""Allreduces of host arrays through torch.distributed: over a private or the user's group."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from multibn import wire
from multibn._typing import HostArray
from multibn.communicators.polling import Poll, chain, poll
from multibn.communicators.watchdog import check_timeout

BLOCK_NUMBERS = wire.length(256)  # of a message's first part: enough for 256 channels
_SIGNAL_CHECK_SECONDS = 0.05  # longest wait inside gloo, so that Python can handle signals
_EXTRA_GLOO_SECONDS = 60.0  # gloo's timeout exceeds multibn's, whose error says more
# NumPy dtypes that both gloo and NCCL can sum; other integers are sent as int64.
_SUMMABLE = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8")

# Starts an in-place allreduce of a vector.
StartAllreduce: TypeAlias = Callable[[HostArray], Poll]


def allreduce_any_dtype(a: HostArray, start: StartAllreduce) -> Iterator[Poll]:
    """Sum a vector in place by `start`, with a copy in another dtype if the backend needs one."""
    parts = a.view(a.real.dtype) if np.iscomplexobj(a) else a
    is_summable = parts.dtype.name in _SUMMABLE
    sent = parts if is_summable else parts.astype(np.int64, casting="same_kind")
    yield start(sent)
    if sent is not parts:
        parts[:] = sent.astype(parts.dtype)


class PrivateGloo:
    """A gloo group used only for multibn's messages.

    torch's environment variables (`GLOO_SOCKET_IFNAME`, ...) select the network interface and TLS.
    The group needs a `store`, or a prefix of one, of its own.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._group: Any = None
        self._sent: torch.Tensor | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def connect(self) -> Iterator[Poll]:
        """Connect the ranks, unless they are connected. Collective."""
        if self._thread is None:
            # Connecting blocks until all ranks arrive. In a thread, the caller can poll with
            # multibn's deadline.
            self._thread = threading.Thread(target=self._connect, daemon=True, name="multibn-gloo")
            self._thread.start()
        is_alive = self._thread.is_alive
        yield partial(poll, lambda: not is_alive())
        if self._error is not None:
            raise RuntimeError(f"no connection over gloo: {self._error}") from self._error

    def close(self, *, failed: bool) -> None:
        """Destroy the group, or leak it if `failed`: after an error or in a forked child.

        There, its end would block: after an error on the pending message, in the child on threads
        that exist only in the parent. A leaked group lets the process exit.
        """
        if failed and self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _connect(self) -> None:
        try:
            timeout = timedelta(seconds=check_timeout() + _EXTRA_GLOO_SECONDS)
            # A store connection serves one call at a time, so this thread's wait would block the
            # status notices. A clone has its own connection.
            store = self._store.clone()  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
        except Exception as error:
            self._error = error

    def start(self, a: HostArray) -> Poll:
        """Start an in-place allreduce of a vector."""
        # If gloo's thread dropped the last reference, it would need the GIL, which this thread may
        # hold while it joins that thread.
        self._sent = torch.from_numpy(a)
        work = self._group.allreduce([self._sent])

        def done(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while True:
                left = max(end - time.monotonic(), 0.0)
                try:
                    # gloo takes a timeout below a millisecond as none.
                    work.wait(timedelta(seconds=max(min(left, _SIGNAL_CHECK_SECONDS), 1e-3)))
                    return True
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # raises, unless the message has arrived meanwhile
                        return True
                if left <= 0:
                    return False

        return done


def allreduce_in_group(
    group: Callable[[], dist.ProcessGroup | None], device: torch.device
) -> StartAllreduce:
    """Return a `StartAllreduce` in the user's group, for a backend without CPU tensors."""

    def parts(a: HostArray) -> Iterator[Poll]:
        host = torch.from_numpy(a)
        x = host.to(device)
        work: Any = dist.all_reduce(x, group=group(), async_op=True)
        # Over NCCL the host does not wait in `work.wait`.
        yield partial(poll, work.is_completed)
        work.wait()
        host.copy_(x)

    return lambda a: chain(parts(a))
