"""Messages over an engine of torch's: a gloo group of multibn's own, beside the user's group.

gloo ends the process where messages of unlike lengths meet. So every message begins with a part of
one length for all: a fingerprint of the message's kind, dtype and shape, and as much of the message
as has room. Only where the fingerprints of all ranks agree does the rest follow.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from multibn import wire
from multibn.communicators.channel import HostArray
from multibn.communicators.polling import Poll, chain, never, poll
from multibn.communicators.watchdog import check_timeout

_ROOM = 516  # numbers of a message in its first part: the moments of 256 channels and fingerprints
_SLICE = 0.05  # seconds; after each wait of this length, Python looks for signals
_AFTER = 60.0  # seconds that gloo waits longer than multibn, which knows more words
# The dtypes of NumPy that gloo can sum; other whole numbers travel as int64.
_SUMMABLE = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8")

Start: TypeAlias = Callable[[HostArray], Poll]


class BlockAllreduce:
    """An allreduce by an engine whose sums must be of one length on all ranks.

    `start` begins to sum a vector over the `size` ranks, in place.
    """

    def __init__(self, number: int, size: int, start: Start) -> None:
        self._number, self._size, self._start = number, size, start
        self._first = np.zeros(2 + _ROOM)

    def begin(self, a: HostArray) -> Poll:
        return chain(self._parts(a))

    def _parts(self, a: HostArray) -> Iterator[Poll]:
        kind = wire.fingerprint(f"{self._number} {a.dtype} {a.shape}")
        flat, first = a.reshape(-1), self._first
        here = flat[: _ROOM if a.dtype == np.float64 else 0]
        first[:2] = kind, kind * kind
        first[2:] = 0.0
        first[2 : 2 + here.size] = here
        yield self._start(first)
        while not wire.all_equal(first[0], first[1], self._size):
            yield never
        here[:] = first[2 : 2 + here.size]
        if here.size < flat.size:
            rest = flat[here.size :]
            parts = rest.view(rest.real.dtype) if np.iscomplexobj(rest) else rest
            is_summable = parts.dtype.name in _SUMMABLE
            sent = parts if is_summable else parts.astype(np.int64, casting="same_kind")
            yield self._start(sent)
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

    def open_allreduce(self, number: int) -> Generator[Poll, None, BlockAllreduce]:
        """As `Transport.open_line`."""
        if self._thread is None:
            # Connecting waits for the other ranks without a deadline of multibn's.
            self._thread = threading.Thread(target=self._connect, daemon=True, name="multibn-gloo")
            self._thread.start()
        is_alive = self._thread.is_alive
        yield partial(poll, lambda: not is_alive())
        if self._error is not None:
            raise RuntimeError(f"no connection over gloo: {self._error}") from self._error
        return BlockAllreduce(number, self._size, self._begin)

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
            timeout = timedelta(seconds=check_timeout() + _AFTER)
            # This thread would keep notices out of the store itself while it waits there.
            store = self._store.clone()  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
        except Exception as error:
            self._error = error

    def _begin(self, a: HostArray) -> Poll:
        # Kept until the next message: to free memory of Python's, gloo's thread would need Python's
        # lock, perhaps while this thread waits for the end of that one.
        self._sent = torch.from_numpy(a)
        work = self._group.allreduce([self._sent])

        def done(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while True:
                left = max(end - time.monotonic(), 0.0)
                try:
                    # gloo takes less than a millisecond for no limit.
                    work.wait(timedelta(seconds=max(min(left, _SLICE), 1e-3)))
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
