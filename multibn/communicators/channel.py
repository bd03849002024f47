"""The channel of a group of ranks: its messages in host memory, the same for every transport.

A channel has an allreduce for each length of messages, so that unlike messages never meet, neither
with each other nor with what else the program sends. A transport opens these and moves bytes. All
else stands here once: which are open, deadlines and notices (see `watchdog`), and the end of the
program.
"""

import atexit
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from multibn._arrays import from_host, to_host
from multibn._typing import Array
from multibn.communicators.communicator import Handle, gather
from multibn.communicators.diagnostics import log_last_error, uncaught
from multibn.communicators.polling import Poll, chain
from multibn.communicators.watchdog import GroupInfo, StatusBoard, Watchdog

HostArray: TypeAlias = np.ndarray[Any, Any]

# The allreduces that are not named by the length of their messages.
_ANY = 0  # carries arrays of any shape and dtype
FIRST_MESSAGES = -1  # carries the first messages of layers, whose length is fixed
LARGE = -2  # carries arrays that are too large for the first


class Allreduce(Protocol):
    """Sums of messages over all ranks of a group; one message at a time."""

    def begin(self, a: HostArray) -> Poll | None:
        """Begin to sum `a` over the ranks, in place; None if that is done already."""


class Transport(ABC):
    """One library that moves bytes, for one group of processes."""

    rank: int
    size: int
    known: GroupInfo | None = None  # before the ranks have met
    board: StatusBoard | None = None  # where notices are left; None before the first message
    most_bytes = math.inf  # of an array that is not `LARGE`

    @abstractmethod
    def open_allreduce(
        self, number: int, buffer: HostArray | None
    ) -> Generator[Poll, None, Allreduce]:
        """Open an allreduce, in steps as `chain` takes.

        Collective: all ranks open the same ones in the same order.

        All its messages are sent from `buffer`, unless that is None.
        """

    def close(self, *, failed: bool) -> None:  # noqa: B027
        """Let go of threads and connections: the group or the program ends, or this is a fork.

        After a failure, and in a fork, a message may be under way, and other ranks hear nothing.
        """

    def free(self) -> None:  # noqa: B027
        """The user has destroyed the group; no message has failed, and `close` follows."""

    def end(self, *, failed: bool) -> None:  # noqa: B027
        """The program ends, and all groups were closed.

        After an error: end the other ranks where they would wait for ever.
        """


@dataclass
class Buffer:
    """Memory for all messages of one length, and what begins to sum what stands there."""

    memory: HostArray
    begin: Callable[[], Poll | None] | None  # None when the group was destroyed


class Channel:
    """The messages of one group of processes, which all handles of the group share."""

    def __init__(self, transport: Transport) -> None:
        _leave_at_exit()
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.watchdog = Watchdog(self.rank, self.size, transport.known)
        self._open: dict[int, Allreduce] = {}
        self._buffers: dict[int, Buffer] = {}  # by the length of messages
        _channels.add(self)

    @property
    def ways(self) -> list[str]:
        """What has carried the messages of layers: "shared memory", for example."""
        channel = [allreduce for number, allreduce in self._open.items() if number > 0]
        return sorted({type(e).__module__.rpartition(".")[2].replace("_", " ") for e in channel})

    def sum(self, a: HostArray, place: str, text: object, *, number: int = _ANY) -> HostArray:
        """The sum of `a` over the ranks, a new array; arguments as `Watchdog.wait`. Collective."""
        total = a.copy()
        if self.size > 1:
            allreduce = self._open.get(number) or self._opened(number, None, text)
            begin: Callable[[], Poll | None] = partial(allreduce.begin, total)
            if a.nbytes > self.transport.most_bytes:
                begin = partial(chain, self._sum_large(total))
            self.watchdog.wait(begin, place, text)
        return total

    def _sum_large(self, a: HostArray) -> Iterator[Poll]:
        """Sum in place, and open the allreduce before, in the same wait.

        A rank that opens one alone, for which no other rank is needed where an engine is connected,
        must not take that for a collective that all have completed.
        """
        if LARGE not in self._open:
            self._open[LARGE] = yield from self.transport.open_allreduce(LARGE, None)
        pending = self._open[LARGE].begin(a)
        if pending is not None:
            yield pending

    def buffer(self, length: int, text: object) -> Buffer:
        """Memory of `length` float64 numbers; `watchdog.wait(buffer.begin, ...)` sums them.

        Layers share the memory. Collective at the first message of this length.
        """
        if length not in self._buffers:
            memory = np.zeros(length)
            allreduce = self._opened(length, memory, text)
            self._buffers[length] = Buffer(memory, partial(allreduce.begin, memory))
        return self._buffers[length]

    def abandon_after_fork(self) -> None:
        """This process is a fork of the one that is a rank of the group."""
        self.abandon()
        self.transport.close(failed=True)
        self.watchdog.failure = (
            f"this process (pid {os.getpid()}) is a fork of rank {self.rank} (pid {os.getppid()}), "
            "whose connections it cannot use. Let the parent train, or give the child's layers "
            "process_group=multibn.SingleProcess(), or start the child by spawn."
        )

    def abandon(self) -> None:
        """No rank waits for this group any more; the end of the program need not mention it."""
        _channels.discard(self)

    def release(self) -> None:
        """The user has destroyed the group: free memory and connections."""
        self.abandon()
        failed = self.watchdog.failure is not None
        self.watchdog.board = None
        self._open.clear()
        for buffer in self._buffers.values():  # layers may have them
            buffer.begin = None
        self._buffers.clear()
        if not failed:  # nor in a fork, which has failed
            self.watchdog.failure = "its process group was destroyed. Give the layer another one."
            self.transport.free()
        self.transport.close(failed=failed)

    def _opened(self, number: int, buffer: HostArray | None, text: object) -> Allreduce:
        self.watchdog.check(text)  # before a fork touches the transport
        if number != _ANY and _ANY not in self._open:
            self._opened(_ANY, None, text)
        opened: list[Allreduce] = []
        steps = self.transport.open_allreduce(number, buffer)
        self.watchdog.board = self.transport.board
        self.watchdog.look(
            f"open {number}", str(text)
        )  # connecting to a rank that failed takes long
        self.watchdog.wait(lambda: chain(steps, opened.append), f"open {number}", text)
        self.watchdog.board = self.transport.board
        (allreduce,) = opened
        self._open[number] = allreduce
        if number == _ANY:
            every: Any = SimpleNamespace(rank=self.rank, size=self.size)
            every.allreduce = lambda a: self.sum(a, "introduction", text)
            self.watchdog.exchange_pids(lambda me: gather(me, every))
        return allreduce


class ChannelCommunicator(Handle, ABC):
    """A communicator whose messages in host memory travel through a `Channel`."""

    @property
    @abstractmethod
    def channel(self) -> Channel | None:
        """None where every sum is on a device."""

    def allreduce(self, x: Array, /) -> Array:
        if self.takes(x):
            return self.allreduce_on_device(x)
        assert self.channel is not None
        a = to_host(x)
        text = f"a sum of {a.dtype} numbers of shape {a.shape}"
        return from_host(self.channel.sum(a, text, text), x)

    def takes(self, x: Array, /) -> bool:
        """Whether `x` is summed on its device; otherwise `x` goes through host memory."""
        return False

    def allreduce_on_device(self, x: Array, /) -> Array:
        """As `allreduce`, of what the communicator `takes`. Without a deadline."""
        raise TypeError(f"{self!r} sums arrays in host memory: got {type(x).__qualname__}.")

    def allreduce_in_place(self, x: Array, /) -> Array:
        """As `allreduce_on_device`; the sum may stand in `x`, whose numbers are then gone."""
        return self.allreduce_on_device(x)


def spin_seconds(num_ranks: int = 1) -> float:
    """How long a rank that waits only offers its core, and wakes without delay.

    Not long where the ranks of a machine outnumber its cores: the system would spend its time on
    their offers.
    """
    # torchrun's name, Open MPI's, that of MPICH and Intel MPI.
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    num_ranks = max(num_ranks, *(int(os.environ.get(name) or 1) for name in names))
    # Linux alone says on which cores a process may run.
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return 2e-4 if num_ranks > len(cores) else 0.1


def after_fork(function: Callable[[], object]) -> None:
    """Call `function` in each forked child of this process, where the system has forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


_channels: WeakSet[Channel] = WeakSet()


@cache
def _leave_at_exit() -> None:
    # At the first use and not before: handlers run last in, first out, and this one needs the
    # libraries that move bytes.
    atexit.register(_leave)


def _after_fork() -> None:
    """In a forked child: the child says nothing in its parent's name, not even at its end."""
    for channel in list(_channels):
        channel.abandon_after_fork()


after_fork(_after_fork)


def _leave() -> None:
    """At exit: no rank may be left to wait for this process."""
    log_last_error()
    every = list(_channels)
    error = uncaught()
    failed = error is not None or any(channel.watchdog.failure for channel in every)
    for channel in every:
        channel.watchdog.leave(error)
    for channel in every:
        channel.transport.close(failed=channel.watchdog.failure is not None)
    for channel in every:
        channel.transport.end(failed=failed)
