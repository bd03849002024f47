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
from multibn.communicators.channel import Buffer, Channel, ChannelCommunicator, HostArray
from multibn.communicators.communicator import Communicator, Forwarding, SingleProcess, gather
from multibn.communicators.diagnostics import display_name, group_ranks_by, log_and_raise
from multibn.communicators.handshake import GroupState, LayerId, check_kind, explained, handshake
from multibn.communicators.transports.pinned import begin_copy
from multibn.communicators.watchdog import ALIKE, Watchdog, alike
from multibn.wire import Message

MOST_PLANS = 64  # of a layer: more are made anew in time


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
        self._find_name = find_name
        self.phases: dict[tuple[str, Any, bool, bool, int], LayerPhase] = {}
        # The plans of the layer's steps, by all in which steps may differ: `multibn.engine.plan`.
        self.plans: dict[Any, Any] = {}
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

    def keep(self, key: object, plan: Any) -> None:
        """Keep a plan for later steps; forget all of them where a layer meets ever new inputs."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def during(
        self,
        phase: str,
        dtype: Any,
        n: int,
        /,
        *,
        needs_gradient: bool = True,
        finetune: bool = False,
        like: Any = None,
    ) -> "LayerPhase":
        """The communicator for messages of `n` numbers, about activations of `dtype`, in a phase.

        `needs_gradient` says whether a backward message may follow; `finetune` is Chainer's. A
        group that sums on GPUs alone compares layers on that of `like`. Collective at the first
        call for a group of ranks; torch's default process group may have been made anew since.
        """
        key = phase, dtype, needs_gradient, finetune, n
        group = self.resolve()
        known = self.phases.get(key)
        if known is None or not known.is_over(group):
            known = self.phases[key] = LayerPhase(self, group, *key, like)
        return known


def during(communicator: Communicator, phase: str, dtype: Any, n: int, /) -> Communicator:
    """`LayerCommunicator.during` of a layer's communicator; any other communicator as it is."""
    if isinstance(communicator, LayerCommunicator):
        return communicator.during(phase, dtype, n)
    return communicator


class _Latest:
    """The latest call of a phase, for people; keeps no layer alive."""

    def __init__(self, phase: "LayerPhase") -> None:
        self._phase = ref(phase)

    def __str__(self) -> str:
        return str(self._phase() or "a layer that was deleted since")


class LayerPhase(Forwarding):
    """A layer's communicator in one phase, for messages of one length.

    What goes with each message is found out when it is made, which is collective where the ranks
    have not compared their layers.
    """

    _known: GroupState
    _place: str
    _fingerprint: float
    _buffer: Buffer  # of the channel, from the first message on
    _payload: HostArray | None = None  # the first numbers of the buffer
    _watchdog: Watchdog  # of the channel
    # The others, the last two of these, and what a rank sends there. NumPy takes 1.2 us to copy
    # four numbers, memoryviews 0.1.
    _tail: Any
    _summed_prints: memoryview
    _sent_tail: memoryview

    def __init__(
        self,
        layer: LayerCommunicator,
        group: Any,
        phase: str,
        dtype: Any,
        needs_gradient: bool,
        finetune: bool,
        n: int,
        like: Any,
    ) -> None:
        self.wrapped = layer
        self.name, self.dtype = phase, str(dtype).rpartition(".")[2]
        self.kind = self.dtype + ", finetune=True" * finetune  # of messages that may meet
        self.gradients = "with gradients" if needs_gradient else "without gradients"
        self._num_numbers, self.num_trailer = n, len(wire.trailer(phase, 0.0))
        self._calls = 0
        self._latest = _Latest(self)
        self._pinned: dict[Any, list[Any]] = {}
        # On a GPU: the dtype of messages, None where they go through host memory.
        self._dtypes: dict[Any, Any] = {}
        self._group = group
        self._channel: Channel | None = (
            group.channel if isinstance(group, ChannelCommunicator) else None
        )
        self._size = int(group.size)
        # A user's own class may do anything, and is called.
        is_ours = self._channel is not None or type(group) is SingleProcess
        self._is_alone = self._size == 1 and is_ours
        self.mark = wire.mark(group.rank)
        trailer = self._handshake(like) if self._size > 1 else []
        self._sent_tail = np.array(trailer).data
        # What all ranks together send, if each sends the same.
        self._fingerprints = [self._size * v for v in trailer[-2:]]

    def is_over(self, group: Any) -> bool:
        """Whether the messages still go to the ranks of `group`."""
        is_same = group is self._group
        return is_same and (self._channel is None or self._channel is group.channel)

    def _look_up(self) -> Any:
        return self._group

    def buffer(self) -> HostArray | None:
        """Memory for the payload, which `allreduce` sends without a copy.

        None where the communicator has no channel. Collective at the first message of this length.
        """
        if self._size == 1:
            return np.empty(self._num_numbers)
        if self._channel is not None and self._payload is None:
            self._payload = self._open(self._calls + 1)
        return self._payload

    def message(self, like: Array) -> Message | None:
        """Memory on a torch GPU for a message; `allreduce` takes it.

        None where such a message would go through host memory.
        """
        device = like.device
        if device not in self._dtypes:
            takes = self._size > 1 and (self._channel is None or self._group.takes(like))
            self._dtypes[device] = array_namespace(like).float64 if takes else None
        dtype = self._dtypes[device]
        if dtype is None:
            return None
        start = self._num_zeros()
        length = start + self._num_numbers + self.num_trailer
        return Message(like.new_empty(length, dtype=dtype), start, self._fingerprint)

    def allreduce(self, x: Array | Message, /) -> Array:
        """Sum a payload; raise on all ranks if the ranks are in different places.

        Memory that `buffer` returned is summed in place, and stays valid until the next message; so
        is a `message`, whose memory is its own.
        """
        self._calls += 1
        if x is not self._payload:
            return self._allreduce_other(x)
        self._tail[:] = self._sent_tail
        self._watchdog.wait(self._buffer.begin, self._place, self._latest)
        if self._summed_prints.tolist() != self._fingerprints:
            self.check(self._buffer.memory)
        return x

    def _allreduce_other(self, x: Array | Message) -> Array:
        """Sum a payload that does not stand in the channel's memory."""
        if self._size == 1:
            return x if self._is_alone else self._group.allreduce(x)
        if isinstance(x, Message) or self._channel is None or self._group.takes(x):
            return self._allreduce_array(x)
        self._calls -= 1
        payload = self.buffer()
        assert payload is not None
        payload[:] = to_host(x)
        # The caller looks at no numbers on a GPU, and has an error if it refuses its input.
        is_for_us = not is_on_host(x) and not wire.is_refusal(payload)
        self.allreduce(payload)
        if is_for_us and self.name == "forward":
            nonfinite.raise_if_nonfinite(self, self.dtype, payload)
        return from_host(payload.copy(), x)

    def __str__(self) -> str:
        return self._call(self._calls)

    def _call(self, number: int) -> str:
        """A call of the layer, for people."""
        return f"{display_name(self.wrapped.name)} ({self.name}, {self.kind}, call {number})"

    def _handshake(self, like: Any) -> list[float]:
        """Learn that all ranks are in a layer like this one, and what follows each payload.

        Collective where that is not known.
        """
        layer, length = self.wrapped, self._num_numbers + self.num_trailer
        call = self._call(self._calls + 1)
        with on_device_of(like):
            name, self._known = handshake(layer, self._group, self._channel, length, call)
        # With the length: layers of one name and unlike widths may meet in a message.
        layer_name, _, number = name.rpartition(" ")
        channels = wire.num_channels(length)
        which = f"{channels} channels, layer {number} by the first call"
        self._place = f"{layer_name} {self.name}: {which}"
        facts = f"{self._place} {self.kind} {self.gradients}"
        if layer.built is None:  # each call of a function has options of its own
            facts += f" {layer.texts()}"
        self._fingerprint = wire.fingerprint(facts)
        return wire.trailer(self.name, self._fingerprint)

    def _open(self, number: int) -> HostArray:
        """The payload's memory, for this call. Collective at the first one for this length."""
        assert self._channel is not None
        n = self._num_numbers
        self._buffer = self._channel.buffer(n + self.num_trailer, self._call(number))
        self._watchdog = self._channel.watchdog
        self._tail = self._buffer.memory[n:].data
        self._summed_prints = self._tail[-2:]
        return self._buffer.memory[:n]

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
        reduce = self._group.allreduce
        if isinstance(x, Message):
            start, numbers = x.start, x.numbers
            if self._channel is not None:
                reduce = self._group.allreduce_in_place
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
