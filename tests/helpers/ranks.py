"""Ranks as threads, for tests of the engine that need no launcher; and a counting communicator."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from multibn import wire
from multibn._typing import Array, HostArray
from multibn.communicators.channel import Buffer, Channel, ChannelCommunicator, resolved
from multibn.communicators.communicator import Communicator
from multibn.communicators.exit import watched_channels
from multibn.communicators.polling import Poll

T = TypeVar("T")


class _Shared:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size


class ThreadCommunicator:
    """One of `size` threads of this process."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = len(shared.slots)
        self._shared = shared

    def allreduce(self, x: Any, /) -> Any:
        first, *others = self._exchange(x)
        return sum(others, start=first + 0)

    def split(self, color: int, key: int = 0) -> "ThreadCommunicator":
        table = self._exchange((color, key, self.rank))
        members = sorted((k, r) for c, k, r in table if c == color)
        shareds = self._exchange(_Shared(len(members)))
        return ThreadCommunicator(members.index((key, self.rank)), shareds[members[0][1]])

    def abort(self) -> None:
        self._shared.barrier.abort()

    def _exchange(self, value: Any) -> list[Any]:
        self._shared.slots[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.slots)
        self._shared.barrier.wait()
        return values


def run_ranks(size: int, function: Callable[[ThreadCommunicator], T]) -> list[T]:
    """Results of `function(communicator)` on each of `size` ranks; the first error is raised."""
    shared = _Shared(size)

    def run(rank: int) -> tuple[Any, BaseException | None]:
        communicator = ThreadCommunicator(rank, shared)
        try:
            return function(communicator), None
        except BaseException as error:
            communicator.abort()  # nobody waits for a rank that failed
            return None, error

    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(run, rank) for rank in range(1, size)]
        # torch before 2.13 dies where a second thread of a process compiles.
        ended = [run(0), *(other.result() for other in others)]
    if "torch._dynamo" in sys.modules:  # `update_bn_stats` puts compilation off, for all threads
        sys.modules["torch"].compiler.set_stance("default")
    errors = [error for _, error in ended if error]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [value for value, _ in ended]


class EqualRanks(ChannelCommunicator):
    """Equal ranks, of which this process is one, that sum every array on its device."""

    rank = 0

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._channel = _EqualChannel(self)

    @property
    def channel(self) -> Any:
        return self._channel

    @property
    def identity(self) -> object:
        return id(self)

    def reduces_on_device(self, x: Array, /) -> bool:
        return True

    def allreduce_on_device(self, x: Any, /) -> Any:
        return sum([x] * (self.size - 1), start=x)  # a stand-in for CuPy's arrays only adds

    def split(self, color: int, key: int = 0) -> "EqualRanks":
        return self


class _EqualChannel(Channel):
    """Layers of equal ranks compare equal."""

    def __init__(self, equal: EqualRanks) -> None:
        transport: Any = SimpleNamespace(
            rank=0,
            size=equal.size,
            block=np.zeros(wire.length(256)),
            board=None,
            carrier="equal ranks",
        )
        transport.prepare_block = lambda n: lambda: self._sum(transport.block)
        transport.prepare = lambda a: lambda: self._sum(a)
        transport.close = transport.end_process = lambda **_: None
        super().__init__(transport)
        self._equal = equal

    def allreduce_checked(self, a: HostArray, *facts: str) -> HostArray:
        return np.asarray(self._equal.allreduce_on_device(a))

    def _sum(self, a: HostArray) -> None:
        a *= self.size


class CountingCommunicator(ChannelCommunicator):
    """Another communicator, and the sizes of its messages; over lines, first messages apart."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.messages: list[int] = []
        self.first_messages: list[int] = []
        self._counting: _CountingChannel | None = None

    @property
    def identity(self) -> object:
        return id(self)

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def channel(self) -> Any:
        inner = getattr(resolved(self.inner), "channel", None)
        if inner is not None and self._counting is None:
            self._counting = _CountingChannel(inner, self)
        return self._counting

    def allreduce(self, x: Array, /, place: str = "") -> Array:
        if place and self.channel is not None:
            return super().allreduce(x, place)
        self.messages.append(prod(x.shape))
        return resolved(self.inner).allreduce(x)

    def reduces_on_device(self, x: Array, /) -> bool:
        return self.channel is not None and bool(resolved(self.inner).reduces_on_device(x))

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.inner.split(color, key)

    def take(self) -> list[int]:
        """The sizes noted since the last call."""
        taken, self.messages = self.messages, []
        return taken


class _CountingChannel(Channel):
    """The channel of the inner communicator. Layers compare themselves anew over this one."""

    def __init__(self, inner: Channel, counting: CountingCommunicator) -> None:
        super().__init__(inner.transport)
        watched_channels.discard(self)
        self._inner, self._counting = inner, counting
        self.watchdog, self.send_refusal = inner.watchdog, inner.send_refusal  # type: ignore[method-assign]

    def allreduce_checked(self, a: HostArray, kind: str, *facts: str) -> HostArray | None:
        if kind == "first message":
            self._counting.first_messages.append(wire.HEAD + a.size)
        else:
            self._counting.messages.append(a.size)
        return self._inner.allreduce_checked(a, kind, *facts)

    def allreduce(self, a: HostArray, place: str = "") -> HostArray:
        self._counting.messages.append(a.size)
        return self._inner.allreduce(a, place)

    def buffer(self, n: int) -> Buffer:
        head, payload, inner_begin = self._inner.buffer(n)

        def begin() -> Poll | None:
            self._counting.messages.append(wire.HEAD + n)
            return inner_begin()

        return head, payload, begin


def refusal(world: Communicator, rank: int, kind: Any, message: str) -> Any:
    """The error on the rank that refuses a call, and the one by which the others learn of it."""
    if world.rank == rank:
        return pytest.raises(kind, match=message)
    return pytest.raises(RuntimeError, match=rf"rejected on rank\(s\) \[{rank}\]")


def errors_of_rank_0(
    call: Callable[[bool, ThreadCommunicator], Any], kind: type[Exception], message: str
) -> None:
    """Rank 0 makes the wrong call, of which the other rank must learn."""

    def run(communicator: ThreadCommunicator) -> None:
        with refusal(communicator, 0, kind, message):
            call(communicator.rank == 0, communicator)

    run_ranks(2, run)
