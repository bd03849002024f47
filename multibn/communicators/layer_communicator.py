"""The messages of one layer, which tell whether all ranks are in the same layer.

A sum of unlike messages is a silent wrong number where their lengths agree; where not, the sum ends
the process inside the transport. So a layer's first message has the same length for all layers, and
compares the layers (see `handshake`); each later message carries a fingerprint of what the
rank is doing (see `multibn.wire`). All ranks see the same sums, so that all of them turn to ask
each other in the same moment.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import numpy as np

from multibn import wire
from multibn._arrays import array_namespace, from_host, is_on_host, on_device_of, to_host
from multibn._typing import Array
from multibn.communicators import nonfinite
from multibn.communicators.channel import Channel, ChannelCommunicator, HostArray
from multibn.communicators.communicator import Communicator, Forwarding, SingleProcess, gather
from multibn.communicators.diagnostics import display_name, group_ranks_by, log_and_raise
from multibn.communicators.handshake import GroupState, LayerId, check_kind, explained, handshake
from multibn.communicators.transports.pinned import begin_copy
from multibn.communicators.watchdog import ALIKE, alike
from multibn.wire import Message


class LayerCommunicator(Forwarding):
    """A communicator as one layer uses it.

    `find_name` returns the name of the layer, `options` what else must be equal on all ranks; both
    are called when the layer first communicates. `built` is which of the process's layers it is;
    None for a function.
    """

    silent_since: object = None  # what another layer has told, see `nonfinite`

    def __init__(
        self,
        communicator: Communicator,
        find_name: Callable[[], str],
        *,
        built: LayerId | None = None,
        options: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.wrapped = communicator
        self.built, self.options = built, options
        self.forwarding = communicator if isinstance(communicator, Forwarding) else None
        self._find_name = find_name
        self.phases: dict[tuple[str, Any, bool, bool], LayerPhase] = {}
        self._elsewhere: dict[Communicator, LayerCommunicator] = {}
        # The names that the layer has in each group, by its own name and the messages' length.
        self.names: WeakKeyDictionary[GroupState, dict[Any, str]] = WeakKeyDictionary()
        self.own_known = GroupState()  # of a communicator that no table can hold

    @cached_property
    def name(self) -> str:
        """The name of the layer."""
        return self._find_name()

    def texts(self) -> dict[str, str]:
        """The options at this moment, for people."""
        return {name: f"{name}={value}" for name, value in self.options().items()}

    @property
    def num_messages(self) -> int:
        """How many messages the layer has sent."""
        return sum(phase._calls for phase in self.phases.values())

    def _look_up(self) -> Communicator:
        return self.wrapped

    def over(self, communicator: Communicator) -> "LayerCommunicator":
        """The same layer's conversation over other processes."""
        if communicator not in self._elsewhere:
            self._elsewhere[communicator] = LayerCommunicator(
                communicator, lambda: self.name, built=self.built, options=self.options
            )
        return self._elsewhere[communicator]

    def during(
        self, phase: str, dtype: Any, needs_gradient: bool = True, finetune: bool = False
    ) -> "LayerPhase":
        """The communicator for messages about activations of `dtype` in a phase of the layer.

        `needs_gradient` says whether a backward message may follow; `finetune` is Chainer's.
        """
        key = phase, dtype, needs_gradient, finetune
        known = self.phases.get(key)
        if known is None:
            known = self.phases[key] = LayerPhase(self, *key)
        return known


def during(communicator: Communicator, phase: str, dtype: Any, /, *facts: bool) -> Communicator:
    """`LayerCommunicator.during` of a layer's communicator; any other communicator as it is."""
    if isinstance(communicator, LayerCommunicator):
        return communicator.during(phase, dtype, *facts)
    return communicator


class _Latest:
    """The latest call of a phase, for people; keeps no layer alive."""

    def __init__(self, phase: "LayerPhase") -> None:
        self._phase = ref(phase)

    def __str__(self) -> str:
        return str(self._phase() or "a layer that was deleted since")


class LayerPhase(Forwarding):
    """A layer's communicator in one phase.

    What goes with each message is found out once for each number of numbers, by `_handshake`.
    """

    _communicator: Any = None  # of the latest messages
    _channel: Channel | None
    _size: int
    _known: GroupState
    _place: str
    _fingerprint: float
    _fingerprints: list[float]  # what all ranks together send, if each sends the same
    _buffer: HostArray  # of the channel, from the first message on
    _payload: HostArray | None  # the first numbers of the buffer
    # The others, the last two of these, and what a rank sends there. NumPy takes 1.2 us to copy
    # four numbers, memoryviews 0.1.
    _tail: Any
    _summed_prints: memoryview
    _sent_tail: memoryview

    def __init__(self, layer: LayerCommunicator, phase: str, dtype: Any, *facts: bool) -> None:
        self.wrapped = layer
        needs_gradient, finetune = facts
        self.name, self.dtype = phase, str(dtype).rpartition(".")[2]
        self.kind = self.dtype + ", finetune=True" * finetune  # of messages that may meet
        self.gradients = "with gradients" if needs_gradient else "without gradients"
        self.num_trailer = len(wire.trailer(phase, 0.0))
        self._num_numbers = -1
        self.mark = wire.NO_MARK
        self._calls = 0
        self._latest = _Latest(self)
        self._pinned: dict[Any, list[Any]] = {}
        # On a GPU: the dtype of messages, None where they go through host memory.
        self._dtypes: dict[Any, Any] = {}

    def _look_up(self) -> Any:
        return self.wrapped

    def buffer(self, n: int) -> HostArray | None:
        """Memory for a payload of `n` numbers, which `allreduce` sends without a copy.

        None where the communicator has no channel. Collective at the first call.
        """
        self._handshake(n)
        if self._size == 1:
            memory = np.empty(n)
            # A user's own class may do anything, and is called.
            if self._channel is not None or type(self._communicator) is SingleProcess:
                self._payload = memory
            return memory
        if self._channel is None:
            return None
        return self._payload if self._payload is not None else self._open(self._calls + 1)

    def message(self, n: int, like: Array) -> Message | None:
        """Memory on a torch GPU for a message with a payload of `n` numbers; `allreduce` takes it.

        None where such a message would go through host memory. Collective at the first call.
        """
        self._handshake(n, like)
        device = like.device
        if device not in self._dtypes:
            takes = self._size > 1 and (self._channel is None or self._communicator.takes(like))
            self._dtypes[device] = array_namespace(like).float64 if takes else None
        dtype = self._dtypes[device]
        if dtype is None:
            return None
        start = self._num_zeros()
        length = start + n + self.num_trailer
        return Message(like.new_empty(length, dtype=dtype), start, self._fingerprint)

    def allreduce(self, x: Array | Message, /) -> Array:
        """Sum a payload; raise on all ranks if the ranks are in different places.

        Memory that `buffer` returned is summed in place, and stays valid until the next message; so
        is a `message`, whose memory is its own.
        """
        if isinstance(x, Message):
            self._calls += 1
            return self._allreduce_array(x)
        if self._num_numbers < 0 or x is not self._payload:
            self._handshake(x.shape[0], x)
        payload, is_for_us = self._payload, False
        self._calls += 1
        if self._size == 1:
            return x if x is payload else self._communicator.allreduce(x)
        if payload is None or x is not payload:
            if self._channel is None or self._communicator.takes(x):
                return self._allreduce_array(x)
            payload = self._open(self._calls)
            payload[:] = to_host(x)
            # The caller looks at no numbers on a GPU, and has an error if it refuses its input.
            is_for_us = not is_on_host(x) and not wire.is_refusal(payload)
        assert self._channel is not None
        self._tail[:] = self._sent_tail
        self._channel.exchange(self._buffer, self._place, self._latest)
        if self._summed_prints.tolist() != self._fingerprints:
            self.check(self._buffer)
        if is_for_us and self.name == "forward":
            nonfinite.raise_if_nonfinite(self, self.dtype, payload)
        return payload if x is payload else from_host(payload.copy(), x)

    def __str__(self) -> str:
        return self._call(self._calls)

    def _call(self, number: int) -> str:
        """A call of the layer, for people."""
        return f"{display_name(self.wrapped.name)} ({self.name}, {self.kind}, call {number})"

    def _handshake(self, n: int, like: Any = None) -> None:
        """Learn that all ranks are in a layer like this one; collective where that is not known.

        A group that sums on GPUs alone does so on that of `like`.
        """
        layer = self.wrapped
        forwarding = layer.forwarding
        communicator: Any = layer.wrapped if forwarding is None else forwarding.resolve()
        if (
            communicator is self._communicator
            and n == self._num_numbers
            # torch's default process group may have been made anew.
            and (self._channel is None or self._channel is communicator.channel)
        ):
            return
        self._num_numbers = -1  # until the ranks have agreed
        self._channel = (
            communicator.channel if isinstance(communicator, ChannelCommunicator) else None
        )
        self._size, self._payload = communicator.size, None
        self.mark = wire.mark(communicator.rank)
        trailer: list[float] = []
        if self._size > 1:
            length = n + self.num_trailer
            call = self._call(self._calls + 1)
            with on_device_of(like):
                name, self._known = handshake(layer, communicator, self._channel, length, call)
            # With the length: layers of one name and unlike widths may meet in a message.
            layer_name, _, number = name.rpartition(" ")
            channels = wire.num_channels(length)
            which = f"{channels} channels, layer {number} by the first call"
            self._place = f"{layer_name} {self.name}: {which}"
            facts = f"{self._place} {self.kind} {self.gradients}"
            if layer.built is None:  # each call of a function has options of its own
                facts += f" {layer.texts()}"
            self._fingerprint = wire.fingerprint(facts)
            trailer = wire.trailer(self.name, self._fingerprint)
        self._sent_tail = np.array(trailer).data
        self._fingerprints = [self._size * v for v in trailer[-2:]]
        self._communicator, self._num_numbers = communicator, n
        self._dtypes = {}

    def _open(self, number: int) -> HostArray:
        """The payload's memory, for this call. Collective at the first one for this length."""
        assert self._channel is not None
        n, call = self._num_numbers, self._call(number)
        self._buffer = self._channel.buffer(n + self.num_trailer, call)
        self._payload = self._buffer[:n]
        self._tail = self._buffer[n:].data
        self._summed_prints = self._tail[-2:]
        return self._payload

    def _num_zeros(self) -> int:
        """How many zeros stand before a payload that is handed over as an array.

        Without a channel, messages of unlike lengths would meet in the transport. The zeros make
        every message as long as the longest that the ranks have agreed on.
        """
        return max(self._known.longest - self._num_numbers - self.num_trailer, 0)

    def _allreduce_array(self, x: Array | Message) -> Array:
        """Over a communicator that is handed arrays: a GPU's transport, or a user's own class."""
        on_host = not isinstance(x, Message) and is_on_host(x)
        known = self._known
        if len(known.unread) >= known.ahead:
            known.look(known.ahead - 1)
        reduce = self._communicator.allreduce
        if isinstance(x, Message):
            start, numbers = x.start, x.numbers
            if self._channel is not None:
                reduce = self._communicator.allreduce_in_place
        else:
            start, sent = self._num_zeros(), to_host(x) if on_host else x
            around = np.zeros(start + self._num_numbers + self.num_trailer)
            around[-self.num_trailer :] = self._sent_tail
            numbers = from_host(around, sent)
            numbers[start : -self.num_trailer] = sent
        summed = reduce(numbers)
        payload = summed[start : -self.num_trailer]
        if on_host:
            self.check(summed)
            return from_host(payload, x)
        wait = begin_copy(summed, self._pinned)
        if wait is not None:
            # Weak: the group's messages keep no model alive.
            known.unread.append((ref(self), self._calls, wait))
        return payload

    def check(self, summed: HostArray, number: int = 0) -> None:
        """Raise on all ranks unless the messages that were summed belong together.

        The caller looks at the numbers of the latest message, this method at those of an earlier
        call, which has a `number`.
        """
        is_refused = self.name == "forward" and wire.is_refusal(summed, self.num_trailer)
        if number and self.name == "forward":
            payload = summed[-self._num_numbers - self.num_trailer : -self.num_trailer]
            nonfinite.raise_if_nonfinite(self, self.dtype, payload, earlier=self._call(number))
        v, square = summed[-2:].tolist()
        # The refused input may be of another dtype, which the fingerprint tells.
        if not wire.all_equal(v, square, self._size) and not is_refused:
            self._raise_for_places(number)

    def _raise_for_places(self, number: int) -> NoReturn:
        """Ask each other where the ranks are, and raise on all of them. Collective."""
        if number:  # the ranks have gone on since, and may be in the same layer again
            log_and_raise(
                RuntimeError,
                f"the ranks were in different places in an earlier call, {self._call(number)}, on "
                f"rank {self.rank}: another rank was in another layer, in another dtype, in a "
                f"function with other options, or alone with or without gradients. {ALIKE}",
            )
        layer = self.wrapped
        check_kind(layer.wrapped, "layer", str(self))
        which = self._place.rpartition(": ")[2]  # models may have layers of one name
        facts = self.gradients, which.partition(",")[0], which
        calls = f"{self}", *(f"{self}, {fact}" for fact in facts)
        answers = gather([f"{self._place} {self.kind}", *calls], layer.wrapped)
        places, texts, gradients, *others = zip(*answers, strict=True)
        if len({*places}) == 1:
            explained(layer, layer.wrapped, None, layer.texts())
            log_and_raise(
                RuntimeError,
                f"the ranks differ in whether a backward pass may follow: "
                f"{group_ranks_by(gradients)}. "
                "Those with gradients would wait for the others: compute gradients on all ranks "
                "or on none, and freeze the same layers on all of them.",
            )
        texts = next(each for each in (texts, *others) if len({*each}) > 1)
        log_and_raise(
            RuntimeError,
            f"the ranks are in different places: {group_ranks_by(texts)}. {alike(texts)}",
        )
