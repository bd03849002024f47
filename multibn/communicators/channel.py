"""Collectives in host memory for one group of ranks, the same for every transport.

Every message starts with the transport's block, a buffer that all messages share. The block holds a
head, and as much of the payload as fits. The sum of the heads shows every rank whether all ranks
are in the same place (layer, phase and call). The rest of a long message is sent only if the heads
agree. A transport only moves bytes; `watchdog` has deadlines and status notices, and `exit` handles
the end of the program.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from numbers import Integral
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from weakref import finalize, ref

import numpy as np

from multibn import wire
from multibn._arrays import from_host, is_on_host, to_host
from multibn._typing import Array, HostArray
from multibn.communicators import diagnostics
from multibn.communicators.communicator import Communicator, Forwarding, Handle, gather
from multibn.communicators.deferred_checks import DeferredChecks
from multibn.communicators.exit import watch, watched_channels
from multibn.communicators.polling import Poll, chain
from multibn.communicators.watchdog import StatusBoard, Watchdog

# Starts summing an array over the ranks, in place; returns None if that is already done.
Begin: TypeAlias = Callable[[], Poll | None]


class Transport(ABC):
    """Moves bytes between one group of processes, one message at a time."""

    rank: int
    size: int
    board: StatusBoard | None = None  # None before the first message
    carrier = ""  # what carries messages, "shared memory" for example; "" until the ranks connect
    block: HostArray  # float64 numbers: the memory of the first part of every message

    def check(self) -> None:  # noqa: B027
        """Raise on all ranks if the transport cannot work. Collective."""

    @abstractmethod
    def open(self) -> Iterator[Poll | None]:
        """Connect the ranks and allocate the block. Yields steps for `chain`. Collective."""

    @abstractmethod
    def prepare_block(self, n: int) -> Begin:
        """Return a function that begins to sum `block[:n]`; it may sum more than `n` numbers.

        Ranks in different places may call it with different `n`.
        """

    @abstractmethod
    def prepare(self, a: HostArray) -> Begin:
        """Return a function that begins to sum `a` in place. Ranks pass one dtype and shape."""

    def close(self, *, failed: bool, at_exit: bool = False) -> None:  # noqa: B027
        """Release threads and connections when the group or the program ends, or after a fork.

        Send nothing if `failed` (also True after a fork): a message may be pending.
        """

    def end_process(self, *, failed: bool) -> None:  # noqa: B027
        """Called at exit, after all groups were closed.

        If `failed`, end the other ranks if they would otherwise wait forever.
        """


# The memory of a head, the memory of a payload, and a function that begins to sum both.
Buffer: TypeAlias = tuple[memoryview, HostArray, Begin]
# Maps (token of the group, channels, name of the function or "") to the layer's name on all ranks
# and its number in the order of first messages.
Compared: TypeAlias = dict[tuple[str, int, str], tuple[str, int]]


class Channel:
    """One group of processes: its messages and their state, which all handles share."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.watchdog = Watchdog(transport)
        self._buffers: dict[int, Buffer] = {}  # by payload length
        # The same on all ranks:
        self.compared: Compared = {}  # for functions; a layer's is in its LayerCommunicator
        self.num_first_messages = 0
        self.longest = 0  # the longest message that the ranks have agreed on
        self.deferred_checks = DeferredChecks()  # of messages summed on a GPU
        watch(self)

    def allreduce(self, a: HostArray, place: str = "") -> HostArray:
        """Return the sum of `a` over the ranks. Error messages name the `place`. Collective."""
        kind = f"a sum of {a.dtype} numbers of shape {a.shape}"
        total = self.allreduce_checked(a, f"{place} ({kind})" if place else kind)
        assert total is not None
        return total

    def allreduce_checked(
        self, a: HostArray, kind: str, facts: str = "", text: str = ""
    ) -> HostArray | None:
        """Return a new array, the sum of `a` over the ranks, or None if the ranks' `facts` differ.

        Collective. `kind` must determine the dtype and shape of `a`. Raises RuntimeError on all
        ranks if their kinds differ, or if one rejects its input. Error messages use `text` for the
        place where this rank is.
        """
        total, text = a.copy(), text or kind
        if self.size == 1:
            return total
        self._open(text)
        head = wire.head(wire.fingerprint(kind + facts))
        self.transport.block[: wire.HEAD] = head
        self.watchdog.wait(self._prepare(total), text)
        head = self.transport.block[: wire.HEAD].tolist()
        if wire.all_equal(head, self.size):
            return total
        check_kinds(self, kind, text, head)
        return None

    def send_refusal(self) -> None:
        """Join the other ranks' pending message with a rejection, so that all of them raise."""
        text = "the rejection of an input"
        self._open(text)
        self.transport.block[: wire.HEAD] = wire.head(wire.rank_bit(self.rank))
        self.watchdog.wait(self.transport.prepare_block(wire.HEAD), text)

    def buffer(self, n: int) -> Buffer:
        """Return memory for a head and `n` numbers, and a function that begins to sum both.

        All messages of the group share this memory. Call it after the group's first message.
        """
        if n not in self._buffers:
            block = self.transport.block
            head, payload = block[: wire.HEAD].data, block[wire.HEAD :][:n]
            if payload.size < n:
                payload = np.zeros(n)
                begin = self._prepare(payload)
            else:
                begin = self.transport.prepare_block(wire.HEAD + n)
            self._buffers[n] = head, payload, begin
        return self._buffers[n]

    def abandon_after_fork(self) -> None:
        """Make every later call raise: this process is a fork of a rank."""
        watched_channels.discard(self)
        self.transport.close(failed=True)
        self.watchdog.failure = (
            f"this process (pid {os.getpid()}) is a fork of rank {self.rank} (pid {os.getppid()}), "
            "and a forked child cannot use its parent's connections. Train in the parent, give the "
            "child's layers process_group=multibn.SingleProcess(), or start the child by spawn."
        )

    def close(self) -> None:
        """Free memory and connections after the user has destroyed the group."""
        watched_channels.discard(self)
        failed = self.watchdog.failure is not None
        self._buffers.clear()
        if not failed:  # otherwise keep the message of the earlier failure or of the fork
            self.watchdog.failure = "its process group was destroyed. Give the layer another one."
        self.transport.close(failed=failed)

    def _open(self, text: object) -> None:
        if self.transport.carrier:
            return
        self.transport.check()
        self.watchdog.wait(lambda: chain(self._connect(str(text))), text)
        every: Any = SimpleNamespace(rank=self.rank, size=self.size)
        every.allreduce = lambda a: self.allreduce_checked(a, "introduction", text=str(text))
        self.watchdog.exchange_pids(lambda me: gather(me, every))

    def _connect(self, text: str) -> Iterator[Poll | None]:
        for step in self.transport.open():
            self.watchdog.check_notices(text)  # raises before the connection times out
            yield step

    def _prepare(self, a: HostArray) -> Begin:
        """Return a function that begins to sum `a`: the block, then the rest if the heads agree."""
        block, flat = self.transport.block, a.reshape(-1)
        first = flat[: block.size - wire.HEAD if a.dtype == np.float64 else 0]
        room, head = block[wire.HEAD :][: first.size], block[: wire.HEAD]
        begin = self.transport.prepare_block(wire.HEAD + first.size)
        rest = flat[first.size :]
        begin_rest = self.transport.prepare(rest) if rest.size else lambda: None

        def parts() -> Iterator[Poll | None]:
            room[:] = first
            yield begin()
            if wire.all_equal(head.tolist(), self.size):
                first[:] = room
                yield begin_rest()

        return lambda: chain(parts())


def check_kinds(communicator: Any, kind: str, text: str, head: list[float]) -> None:
    """Raise on all ranks if one rejected its input or the messages' kinds differ. Collective.

    Call it if the heads differ; `head` is their sum. Returns if only the facts differ.
    """
    if wire.is_refused(head):
        diagnostics.raise_for_refusal(communicator, head[:1], text)
    kinds, texts = zip(*gather((kind, text), communicator), strict=True)
    if len({*kinds}) > 1:
        diagnostics.raise_for_places(texts)


class ChannelCommunicator(Handle, ABC):
    """A communicator whose messages in host memory travel through a `Channel`."""

    @property
    @abstractmethod
    def channel(self) -> Channel | None:
        """The channel, or None for one process. In a forked child, the parent's, which raises."""

    def allreduce(self, x: Array, /, place: str = "") -> Array:
        """Sum `x` over the ranks; error messages name the `place` of this call."""
        if self.reduces_on_device(x):
            return self.allreduce_on_device(x)
        assert self.channel is not None
        return from_host(self.channel.allreduce(to_host(x), place), x)

    def reduces_on_device(self, x: Array, /) -> bool:
        """Whether `x` is summed on its device; otherwise `x` goes through host memory."""
        return False

    def allreduce_on_device(self, x: Array, /) -> Array:
        """Sum `x` on its device if `reduces_on_device(x)`. The watchdog sets no deadline for it."""
        raise TypeError(f"{self!r} sums arrays in host memory: got {type(x).__qualname__}.")


class _UserCommunicator(ChannelCommunicator, Transport):
    """A wrapper of a communicator of a user's own class, whose `allreduce` blocks.

    Arrays in host memory travel through a channel; other arrays go straight to `allreduce`.
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        native = find()
        self.rank, self.size = native.rank, native.size
        self._find, self._name = find, type(native).__qualname__
        self.block = np.zeros(wire.length(_WIDEST))
        self._channel = Channel(self)

    @property
    def channel(self) -> Channel:
        return self._channel

    @property
    def native(self) -> Any:
        """The object of the user's class."""
        return self._find()

    def reduces_on_device(self, x: Array, /) -> bool:
        return not is_on_host(x)

    def allreduce_on_device(self, x: Array, /) -> Array:
        return cast(Array, self.native.allreduce(x))

    def split(self, color: int, key: int = 0) -> Any:
        return self.native.split(color, key)

    def check(self) -> None:
        members = [v if isinstance(v, Integral) else np.nan for v in (self.rank, self.size)]
        sent = np.array([1.0, *members, _EXACT])
        size, got = float(sent[2]), self._sum(sent).tolist()
        expected = [size, size * (size - 1) / 2, size * size, size * _EXACT]
        if got != expected:
            diagnostics.log_and_raise(
                TypeError,
                f"`rank`, `size` and `allreduce` of {self._name} are inconsistent: the sum of "
                f"[1, rank, size, {_EXACT}] over all ranks must be {expected}: got {got}, on rank "
                f"{self.rank!r} of {self.size!r}. Correct these members.",
            )

    def open(self) -> Iterator[Poll | None]:
        self.carrier = self._name
        return iter(())

    def prepare_block(self, n: int) -> Begin:
        return partial(self._sum_in_place, self.block, n)  # all of it: ranks may differ in `n`

    def prepare(self, a: HostArray) -> Begin:
        return partial(self._sum_in_place, a, a.size)

    def _sum_in_place(self, a: HostArray, n: int) -> None:
        a[:n] = self._sum(a)[:n]

    def _sum(self, a: HostArray) -> HostArray:
        native = self.native
        summed = native.allreduce(a.copy())
        kind = type(summed), getattr(summed, "dtype", None), getattr(summed, "shape", None)
        if kind != (np.ndarray, a.dtype, a.shape):
            diagnostics.raise_for_sum(native, f"{summed!r} for {a!r}")
        return cast(HostArray, summed)


_EXACT = 1 + 2.0**-40  # float32 rounds this to 1
_WIDEST = 2048  # channels; a message of a wider layer takes a second call of `allreduce`


_user_communicators: dict[int, _UserCommunicator] = {}  # by the id of the user's object


def resolved(communicator: Any, /) -> Any:
    """Return the communicator behind `Forwarding` ones, with a channel if its class is a user's."""
    while isinstance(communicator, Forwarding):
        communicator = communicator._look_up()
    if isinstance(communicator, Handle):
        return communicator
    if id(communicator) in _user_communicators:
        return _user_communicators[id(communicator)]
    if not isinstance(communicator, Communicator):
        return communicator

    def find() -> Any:
        return communicator

    with suppress(TypeError):  # the class may not allow weak references
        find = ref(communicator)
        finalize(communicator, _user_communicators.pop, id(communicator), None).atexit = False
    return _user_communicators.setdefault(id(communicator), _UserCommunicator(find))


def at(communicator: Any, place: str) -> Any:
    """Return a communicator like this one, whose error messages name the `place`."""
    group = resolved(communicator)
    allreduce = partial(group.allreduce, place=place)
    named = SimpleNamespace(rank=group.rank, size=group.size, allreduce=allreduce)
    return named if isinstance(group, ChannelCommunicator) else group


def flush_checks() -> None:
    """Check all messages summed on a GPU now; otherwise, later calls of the layers check them.

    Call it after the last batch. Not collective. If a check fails, it raises on every rank that
    calls this function.
    """
    for channel in list(watched_channels):
        channel.deferred_checks.flush()
