"""The messages of one layer, which tell whether all ranks are in the same layer.

A sum of unlike messages is a silent wrong number where their lengths agree; where not, the sum ends
the process inside the transport. So a layer's first message compares the layers (see `handshake`),
and the head of each later one has a fingerprint of what the rank is doing (see `multibn.wire`). All
ranks see the same sum of heads, so that all of them turn to ask each other in the same moment.
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
from multibn.communicators.channel import (
    Buffer,
    Channel,
    ChannelCommunicator,
    HostArray,
    raise_for_kinds,
)
from multibn.communicators.communicator import Communicator, Forwarding, SingleProcess, gather
from multibn.communicators.diagnostics import (
    ALIKE,
    alike,
    display_name,
    group_ranks_by,
    log_and_raise,
    log_to_stderr,
)
from multibn.communicators.handshake import GroupState, LayerId, explained, handshake
from multibn.communicators.unread import COPIED, Summed, is_captured, stream_of
from multibn.communicators.watchdog import Watchdog
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
        self.communicator = communicator
        self.built, self.options = built, options
        self._find_name = find_name
        self.phases: dict[tuple[str, Any, bool, bool, int], LayerPhase] = {}
        # The plans of the layer's steps, by all in which steps may differ: `multibn.engine.plan`.
        self.plans: dict[Any, Any] = {}
        self._elsewhere: dict[Communicator, LayerCommunicator] = {}
        # The names that the layer has in each group, by its own name and the messages' length.
        self.names: WeakKeyDictionary[GroupState, dict[Any, str]] = WeakKeyDictionary()
        self.own_known = GroupState()  # of a communicator that no table can hold

    @property
    def layer(self) -> "LayerCommunicator":
        """Itself, as its phases have it."""
        return self

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
        return self.communicator

    def over(self, communicator: Communicator) -> "LayerCommunicator":
        """The same layer's messages over other processes."""
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
        if self.built is not None:  # a function has a plan for one call
            plan.prepare_launches()

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


def refuse(communicator: Any, error: Exception) -> None:
    """Tell the other ranks that this one has refused an input, before it raises its own `error`.

    Without a word to those of a communicator that has no channel. Collective.
    """
    group = communicator.resolve() if isinstance(communicator, Forwarding) else communicator
    channel = group.channel if isinstance(group, ChannelCommunicator) else None
    if channel is not None and channel.size > 1:
        log_refusal(communicator, error)
        channel.refuse()


def log_refusal(communicator: Any, error: Exception) -> None:
    """Print the `error` of a rank that refuses an input, which names no layer itself."""
    where = f"rank {communicator.rank} in {nonfinite.name_of(communicator)}: "
    log_to_stderr(str(error), where)


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
    _payload: HostArray | None = None  # of the buffer
    _watchdog: Watchdog  # of the channel
    # The head of the buffer, and what a rank sends there. NumPy takes 1.2 us to copy a few numbers,
    # memoryviews 0.1.
    _head: memoryview
    _sent_head: memoryview

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
        self.layer = layer
        self.name, self.dtype = phase, str(dtype).rpartition(".")[2]
        self.kind = self.dtype + ", finetune=True" * finetune  # of messages that may meet
        self.gradients = "with gradients" if needs_gradient else "without gradients"
        self._num_numbers = n
        self._calls = 0
        self._latest = _Latest(self)
        self._self = ref(self)
        # On a GPU: the dtype of messages, None where they go through host memory.
        self._dtypes: dict[Any, Any] = {}
        self._group = group
        self._channel: Channel | None = (
            group.channel if isinstance(group, ChannelCommunicator) else None
        )
        # A message's memory is nobody else's.
        is_ours = isinstance(group, ChannelCommunicator)
        self._reduce = group.allreduce_in_place if is_ours else group.allreduce
        self._size = int(group.size)
        # A user's own class may do anything, and is called.
        is_ours = self._channel is not None or type(group) is SingleProcess
        self._is_alone = self._size == 1 and is_ours
        self.mark = wire.mark(group.rank)
        head = self._handshake(like) if self._size > 1 else []
        self._sent_head = np.array(head).data
        # What all ranks together send, if each sends the same.
        self._expected = [self._size * v for v in head]

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
        return Message(like.new_empty(self._length(), dtype=dtype), self._fingerprint)

    def allreduce(self, x: Array | Message, /, *, copied: bool = False) -> Array:
        """Sum a payload; raise on all ranks if the ranks are in different places.

        Memory that `buffer` returned is summed in place, and stays valid until the next message; so
        is a `message`, whose memory is its own, and is kept for a while unless it is `copied`.
        """
        self._calls += 1
        if type(x) is Message:
            return self._on_device(x.numbers, self._reduce, copied)
        if x is not self._payload:
            return self._allreduce_other(x, copied)
        self._head[:] = self._sent_head
        self._watchdog.wait(self._buffer.begin, self._latest)
        head = self._head.tolist()
        if head != self._expected:
            self._raise_for_places(head)
        return x

    def _allreduce_other(self, x: Array, copied: bool) -> Array:
        """Sum a payload that does not stand in the channel's memory."""
        if self._size == 1:
            return x if self._is_alone else self._group.allreduce(x)
        if self._channel is None or self._group.takes(x):
            return self._allreduce_array(x, copied)
        self._calls -= 1
        payload = self.buffer()
        assert payload is not None
        payload[:] = to_host(x)
        if self._refuses(payload):
            self._calls += 1
            self._head[:] = np.array(wire.head(self.mark)).data
            self._watchdog.wait(self._buffer.begin, self._latest)
            return x  # the caller has an error
        self.allreduce(payload)
        if not is_on_host(x) and self.name == "forward":  # the caller looks at no numbers on a GPU
            nonfinite.raise_if_nonfinite(self, self.dtype, payload)
        return from_host(payload.copy(), x)

    def _refuses(self, payload: HostArray) -> bool:
        return self.name == "forward" and wire.is_refusal(payload)

    def __str__(self) -> str:
        return self._call(self._calls)

    def _call(self, number: int) -> str:
        """A call of the layer, for people."""
        return f"{display_name(self.layer.name)} ({self.name}, {self.kind}, call {number})"

    def _handshake(self, like: Any) -> list[float]:
        """Learn that all ranks are in a layer like this one, and what stands before each payload.

        Collective where that is not known.
        """
        layer, channels = self.layer, wire.num_channels(self.name, self._num_numbers)
        call = self._call(self._calls + 1)
        with on_device_of(like):
            name, self._known = handshake(layer, self._group, self._channel, channels, call)
        # With the width: layers of one name may meet in a message.
        layer_name, _, number = name.rpartition(" ")
        which = f"{channels} channels, layer {number} by the first call"
        self._place = f"{layer_name} {self.name}: {which}"
        facts = f"{self._place} {self.kind} {self.gradients}"
        if layer.built is None:  # each call of a function has options of its own
            facts += f" {layer.texts()}"
        self._fingerprint = wire.fingerprint(facts)
        return wire.head(self._fingerprint)

    def _open(self, number: int) -> HostArray:
        """The payload's memory, for this call. Collective at the first one for this length."""
        assert self._channel is not None
        self._buffer = self._channel.buffer(self._num_numbers, self._call(number))
        self._watchdog, self._head = self._channel.watchdog, self._buffer.head
        return self._buffer.payload

    def _length(self) -> int:
        """How many numbers a message has that is handed over as an array.

        Without a channel, messages of unlike lengths would meet in the transport. Zeros make every
        message as long as the longest that the ranks have agreed on.
        """
        return max(self._known.longest, wire.HEAD + self._num_numbers)

    def _allreduce_array(self, x: Array, copied: bool) -> Array:
        """Sum over what is handed arrays: a GPU's transport, or a user's own class."""
        on_host, end = is_on_host(x), wire.HEAD + self._num_numbers
        sent, around = to_host(x) if on_host else x, np.zeros(self._length())
        refuses = on_host and self._refuses(sent)
        around[: wire.HEAD] = wire.head(self.mark) if refuses else self._sent_head
        numbers = from_host(around, sent)
        numbers[wire.HEAD : end] = sent
        if not on_host:
            return self._on_device(numbers, self._group.allreduce, copied)
        summed = self._group.allreduce(numbers)
        head = summed[: wire.HEAD].tolist()
        if head != self._expected and not refuses:
            self._raise_for_places(head)
        return from_host(summed[wire.HEAD : end], x)

    def _on_device(self, numbers: Array, reduce: Callable[[Array], Array], copied: bool) -> Array:
        """Sum a message on a GPU; the payload of the sum. The host looks at it later."""
        if is_captured(numbers):
            return reduce(numbers)[wire.HEAD : wire.HEAD + self._num_numbers]
        self._known.unread.look_if_due(COPIED if copied else None)
        summed = reduce(numbers)
        kind = COPIED if copied else (summed.shape, summed.device, stream_of(summed))
        self._known.unread.keep(Summed(self._self, self._calls, summed, self._expected, kind))
        return summed[wire.HEAD : wire.HEAD + self._num_numbers]

    def check(self, summed: HostArray, number: int) -> None:
        """Raise on all ranks unless the messages that a GPU has summed in a call belong together.

        The ranks have gone on since, and may be in the same layer again.
        """
        call, head = self._call(number), summed[: wire.HEAD].tolist()
        if self.name == "forward":
            payload = summed[wire.HEAD :][: self._num_numbers]
            nonfinite.raise_if_nonfinite(self, self.dtype, payload, earlier=call)
        if not wire.all_equal(head, self._size):
            log_and_raise(
                RuntimeError,
                f"the ranks were in different places in an earlier call, {call}, on "
                f"rank {self.rank}: another rank was in another layer, in another dtype, in a "
                f"function with other options, or alone with or without gradients. {ALIKE}",
            )

    def _raise_for_places(self, head: Any) -> NoReturn:
        """Ask each other where the ranks are, and raise on all of them. Collective.

        `head` is the sum of heads, from which a refusal is known; all ranks see the same.
        """
        layer = self.layer
        if wire.is_refused(head):
            nonfinite.raise_for_refusal(self, nonfinite.name_of(self), head[:1])
        raise_for_kinds(layer.communicator, "layer", str(self), head)
        which = self._place.rpartition(": ")[2]  # models may have layers of one name
        facts = self.gradients, which.partition(",")[0], which
        calls = f"{self}", *(f"{self}, {fact}" for fact in facts)
        answers = gather([f"{self._place} {self.kind}", *calls], layer.communicator)
        places, texts, gradients, *others = zip(*answers, strict=True)
        if len({*places}) == 1:
            explained(layer, layer.communicator, None, layer.texts())
            log_and_raise(
                RuntimeError,
                f"the ranks differ in whether a backward pass may follow: "
                f"{group_ranks_by(gradients)}. "
                "Those with gradients would wait for the others: compute gradients on all ranks "
                "or on none, and freeze the same layers on all of them. A rank that validates "
                "under torch.no_grad() must call model.eval() before.",
            )
        texts = next(each for each in (texts, *others) if len({*each}) > 1)
        log_and_raise(
            RuntimeError,
            f"the ranks are in different places: {group_ranks_by(texts)}. {alike(texts)}",
        )
