"""Messages over an engine of torch's: a gloo group of multibn's own, beside the user's group."""

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
_SIGNAL_CHECK_SECONDS = 0.05  # seconds; after each wait of this length, Python looks for signals
_EXTRA_GLOO_SECONDS = 60.0  # gloo's timeout is longer than multibn's, whose error says more
# The dtypes of NumPy that gloo can sum; other whole numbers travel as int64.
_SUMMABLE = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8")

# Begins to sum a vector over the ranks, in place.
Start: TypeAlias = Callable[[HostArray], Poll]


def sum_any(a: HostArray, start: Start) -> Iterator[Poll]:
    """Sum a vector in place, converting dtypes that gloo does not sum; `start` begins a sum."""
    parts = a.view(a.real.dtype) if np.iscomplexobj(a) else a
    is_summable = parts.dtype.name in _SUMMABLE
    sent = parts if is_summable else parts.astype(np.int64, casting="same_kind")
    yield start(sent)
    if sent is not parts:
        parts[:] = sent.astype(parts.dtype)


class PrivateGloo:
    """A gloo group of some of a group's ranks, for messages of multibn's alone.

    The interfaces and the encryption are those that torch's environment variables say. The `store`
    is used by this group alone.
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
            # Connecting waits for the other ranks without a deadline of multibn's.
            self._thread = threading.Thread(target=self._connect, daemon=True, name="multibn-gloo")
            self._thread.start()
        is_alive = self._thread.is_alive
        yield partial(poll, lambda: not is_alive())
        if self._error is not None:
            raise RuntimeError(f"no connection over gloo: {self._error}") from self._error

    def close(self, *, failed: bool) -> None:
        """End the group.

        After a failure, gloo would wait for a message that is under way; and a fork would wait for
        its parent's threads. Then the group is kept for ever, so that the process ends by itself.
        """
        if failed and self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _connect(self) -> None:
        try:
            timeout = timedelta(seconds=check_timeout() + _EXTRA_GLOO_SECONDS)
            # This thread would keep notices out of the store itself while it waits there.
            store = self._store.clone()  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
        except Exception as error:
            self._error = error

    def start(self, a: HostArray) -> Poll:
        """Begin to sum a vector in place."""
        # Kept until the next message: to free memory of Python's, gloo's thread would need Python's
        # lock, perhaps while this thread waits for the end of that one.
        self._sent = torch.from_numpy(a)
        work = self._group.allreduce([self._sent])

        def done(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while True:
                left = max(end - time.monotonic(), 0.0)
                try:
                    # To gloo, a timeout below a millisecond is no timeout.
                    work.wait(timedelta(seconds=max(min(left, _SIGNAL_CHECK_SECONDS), 1e-3)))
                    return True
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # raises, unless the message has come meanwhile
                        return True
                if left <= 0:
                    return False

        return done


def in_group(group: Callable[[], dist.ProcessGroup | None], device: torch.device) -> Start:
    """Sums in the user's own group, over an engine that knows no arrays in host memory."""

    def parts(a: HostArray) -> Iterator[Poll]:
        host = torch.from_numpy(a)
        x = host.to(device)
        work: Any = dist.all_reduce(x, group=group(), async_op=True)
        # Over NCCL the host does not wait in `work.wait`.
        yield partial(poll, work.is_completed)
        work.wait()
        host.copy_(x)

    return lambda a: chain(parts(a))
