"""The messages of one layer, which check that all ranks are in the same layer.

Without this check, a sum of messages from different layers would be silently wrong, or the
transport would abort the process if the lengths differ. So a layer's first message compares the
layers (see `handshake`). The head of each later message has a fingerprint of the rank's place (see
`multibn.wire`). All ranks receive the same sum of heads; if it is unexpected, they compare their
places in the same call.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias
from weakref import proxy

import numpy as np

from multibn import wire
from multibn._arrays import from_host, is_on_host, on_device_of, to_host
from multibn._typing import Array, HostArray
from multibn.communicators import diagnostics, nonfinite
from multibn.communicators.channel import Compared, resolved
from multibn.communicators.communicator import Communicator, Forwarding, SingleProcess
from multibn.communicators.deferred_checks import IN_GRAPH_MEMORY, is_captured, stream_of
from multibn.communicators.handshake import handshake, raise_for_mismatch
from multibn.wire import Message

# Phase, dtype of the activations, needs_gradient, finetune, length of the payload.
_PhaseKey: TypeAlias = tuple[str, Any, bool, bool, int]
MAX_PLANS = 64  # per layer; a full cache is cleared


@dataclass(eq=False, repr=False)
class LayerCommunicator(Forwarding):
    """A communicator as one layer uses it.

    `find_path` returns the layer's path in its model, or "" if no model runs; the layer's name is
    then `class_name`. `options` returns the options, which must be equal on all ranks. Both are
    called when the layer first communicates. `detail` adds to the description of a number of
    channels, ", num_groups=2" for example; the ranks compare it, too. `check_options` raises if an
    option is invalid; it is called before a plan is made. `compared` records earlier handshakes: a
    copy of a layer keeps them, so that one rank can go on with a copy and the others with the
    original. `is_function` is True for a functional call, which has a communicator of its own.
    """

    communicator: Communicator
    find_path: Callable[[], str]
    class_name: str = "a layer"
    _: KW_ONLY
    options: Callable[[], Mapping[str, object]] = dict
    detail: Callable[[int], str] = lambda channels: ""
    compared: Compared = field(default_factory=dict)
    check_options: Callable[[], None] = lambda: None
    is_function: bool = False

    phases: "dict[_PhaseKey, LayerPhase]" = field(default_factory=dict, init=False)
    # The layer's plans (`multibn.engine.plan`), by everything on which a plan depends.
    plans: dict[Any, Any] = field(default_factory=dict, init=False)
    _by_group: "dict[Communicator, LayerCommunicator]" = field(default_factory=dict, init=False)

    @property
    def layer(self) -> "LayerCommunicator":
        """This object; `LayerPhase` has the same attribute."""
        return self

    @cached_property
    def path(self) -> str:
        """The layer's path in the model that ran when the layer first communicated, or ""."""
        return self.find_path()

    @property
    def name(self) -> str:
        """The name of the layer in messages."""
        return self.path or self.class_name

    @cached_property
    def texts(self) -> dict[str, str]:
        """Each option as "name=value", cached until `refresh_options`."""
        return {name: f"{name}={value}" for name, value in self.options().items()}

    def refresh_options(self) -> None:
        """Read the options again. If one has changed, drop all plans; the next message compares."""
        before = vars(self).pop("texts", None)
        if before is not None and self.texts != before:
            self.plans = {}

    def _look_up(self) -> Communicator:
        return self.communicator

    def for_group(self, communicator: Communicator) -> "LayerCommunicator":
        """Return this layer's communicator for another group of processes."""
        if communicator not in self._by_group:
            layer = replace(self, communicator=communicator, find_path=lambda: self.path)
            self._by_group[communicator] = layer
        return self._by_group[communicator]

    def cache_plan(self, key: object, plan: Any) -> None:
        """Keep a plan for later steps. Clear the cache first if it is full."""
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[key] = plan
        if not self.is_function:
            plan.prepare_launches()

    def for_phase(
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
        """Return the communicator for payloads of `n` numbers, from activations of `dtype`.

        `needs_gradient` says whether a backward message may follow; `finetune` is Chainer's. New
        options do not restart the count of calls. A group without a CPU backend compares layers on
        the GPU of `like`. Collective in the first call with these arguments for each group.
        """
        key = phase, dtype, needs_gradient, finetune, n
        group = resolved(self)
        cached = self.phases.get(key)
        if cached is None or not cached.is_for(group) or cached.texts != self.texts:
            cached = self.phases[key] = LayerPhase(self, group, key, like)
        return cached


def function_communicator(
    name: str, communicator: Communicator, options: Mapping[str, object], /
) -> LayerCommunicator:
    """Return the communicator of one call of the function `name`; its errors show C."""
    return LayerCommunicator(
        communicator,
        lambda: name,
        options=lambda: options,
        detail=lambda channels: f", C={channels}",
        is_function=True,
    )


def for_phase(communicator: Communicator, phase: str, dtype: Any, n: int, /) -> Communicator:
    """Call `for_phase` of a layer's communicator; return any other communicator unchanged."""
    if isinstance(communicator, LayerCommunicator):
        return communicator.for_phase(phase, dtype, n)
    return communicator


def reject_input(
    communicator: Any,
    error: Exception | None = None,
    num_channels: int | None = None,
    like: Any = None,
) -> None:
    """Join the other ranks' message with a rejection, so that they raise instead of waiting.

    Call it on a rank whose input is invalid, before this rank raises its `error`, which is also
    logged to stderr. Collective. For messages on a GPU, `num_channels` and `like` determine the
    length and the device of the message that the other ranks send.
    """
    if communicator.size == 1:
        return
    if error is not None:
        name = nonfinite.name_of(communicator)
        diagnostics.log_to_stderr(f"rank {communicator.rank} in {name}: {error}")
    group, is_layer = resolved(communicator), isinstance(communicator, LayerCommunicator)
    if num_channels and is_layer and group.reduces_on_device(like):
        n = wire.forward_payload(num_channels)
        communicator.for_phase("forward", like.dtype, n, like=like).send_refusal(like)
    else:
        group.channel.send_refusal()


class LayerPhase(Forwarding):
    """A layer's communicator in one phase, for messages of one length.

    The constructor computes the head of the messages. The constructor is collective if the ranks
    have not compared their layers.
    """

    _payload: HostArray | None = None  # the channel's memory; None for one process

    def __init__(self, layer: LayerCommunicator, group: Any, key: _PhaseKey, like: Any) -> None:
        phase, dtype, needs_gradient, finetune, n = key
        self.layer, self.texts = layer, layer.texts
        self.name, self.dtype = phase, str(dtype).rpartition(".")[2]
        self.kind = self.dtype + ", finetune=True" * bool(finetune)  # equal in matching messages
        self.gradients = "with gradients" if needs_gradient else "without gradients"
        self._num_numbers, self._payload_slice = n, slice(wire.HEAD, wire.HEAD + n)
        previous = layer.phases.get(key)
        # The number of calls, in a list that a later phase of the same group shares.
        self._calls: list[int] = previous._calls if previous and previous.is_for(group) else [0]
        self._previous = previous  # keep it alive: its last GPU messages may still be unchecked
        if previous is not None:
            previous._previous = None
        self._proxy = proxy(self)  # keeps no layer alive; its str() names the latest call
        self._group = group
        self._channel: Any = getattr(group, "channel", None)
        # In place if possible: nothing else uses the memory of a GPU message.
        self._reduce = getattr(group, "allreduce_in_place", group.allreduce)
        self._size = int(group.size)
        if self._size == 1:
            return
        head = self._handshake(like)
        # A memoryview, since NumPy takes 1.2 us to copy a few numbers, and a memoryview 0.1 us.
        self._sent_head = np.array(head).data
        # The sum of the heads if all ranks send the same head.
        self._expected = [self._size * v for v in head]
        self._expected_head = np.array(self._expected).data
        self._watchdog = group.channel.watchdog
        self._head, self._payload, self._begin = group.channel.buffer(n)

    def is_for(self, group: Any) -> bool:
        """Whether the messages go to the ranks of `group`, whose channel is still the same."""
        return group is self._group and self._channel is getattr(group, "channel", None)

    def _look_up(self) -> Any:
        return self._group

    def buffer(self) -> HostArray:
        """Return memory for the payload, which `allreduce` sends without a copy."""
        return np.empty(self._num_numbers) if self._payload is None else self._payload

    def reduces_on_device(self, x: Array, /) -> bool:
        """Whether messages like `x` are summed on their device, without a copy in host memory."""
        return self._size > 1 and bool(self._group.reduces_on_device(x))

    def message(self, like: Array) -> Message:
        """Return memory for a message on the GPU of `like`, if `reduces_on_device(like)`."""
        float64 = sys.modules["torch"].float64
        return Message(like.new_empty(self._length(), dtype=float64), self._fingerprint)

    def allreduce(self, x: Array | Message, /, *, copied: bool = False) -> Array:
        """Sum a payload; raise on all ranks if the ranks are in different places.

        Memory that `buffer` returned is summed in place, and is valid until the next message. A
        `message` is also summed in place, and kept until its check. For compiled code, pass
        `copied=True`: the message is copied to the host at once, and only the copy is kept.
        """
        self._calls[0] += 1
        if type(x) is Message:
            return self._on_device(x.numbers, self._reduce, copied)
        if x is not self._payload:
            return self._allreduce_other(x, copied)
        self._head[:] = self._sent_head
        self._watchdog.wait(self._begin, self._proxy)
        if self._head != self._expected_head:
            raise_for_mismatch(self, self._group, self._head.tolist())
        return x

    def _allreduce_other(self, x: Array, copied: bool) -> Array:
        """Sum a payload that is not in the channel's memory."""
        if self._size == 1:
            is_ours = self._channel is not None or type(self._group) is SingleProcess
            return x if is_ours else self._group.allreduce(x)  # always call a user's own method
        if self._group.reduces_on_device(x):
            empty = np.zeros(self._length())
            empty[: wire.HEAD] = self._sent_head
            numbers = from_host(empty, x)
            numbers[self._payload_slice] = x
            return self._on_device(numbers, self._group.allreduce, copied)
        self._calls[0] -= 1  # counted by the call below
        payload = self.buffer()
        payload[:] = to_host(x)
        self.allreduce(payload)
        if not is_on_host(x) and self.name == "forward":  # on a GPU, the caller does not
            nonfinite.raise_if_nonfinite(self, self.dtype, payload)
        return from_host(payload.copy(), x)

    def send_refusal(self, like: Any) -> None:
        """Join the other ranks' message on a GPU with a rejection, so that all of them raise."""
        self._calls[0] += 1
        mark = wire.rank_bit(self.rank)
        numbers = np.full(self._length(), mark)  # turns the other ranks' statistics into NaN
        numbers[: wire.HEAD] = wire.head(mark)
        self._on_device(from_host(numbers, like), self._group.allreduce, copied=False)

    def __str__(self) -> str:
        return self._call(self._calls[0])

    def _call(self, number: int) -> str:
        """Return the text that names a call of the layer in error messages."""
        name = diagnostics.display_name(self.layer.name)
        return f"{name} ({self.name}, {self.kind}, call {number})"

    def _handshake(self, like: Any) -> list[float]:
        """Check that all ranks are in the same layer, and return the head of its messages."""
        layer, channels = self.layer, wire.num_channels(self.name, self._num_numbers)
        width = f"{channels} channels"
        self.kind += layer.detail(channels)
        with on_device_of(like):
            name, number = handshake(layer, self._group, channels, self._call(self._calls[0] + 1))
        # Details for error messages if the layers have the same name.
        self.facts = self.gradients, width, f"{width}, layer {number} in call order"
        self.place = f"{name} {self.name}: {self.facts[-1]} {self.kind}"
        facts = f"{self.place} {self.gradients}"
        if self.name == "forward":  # a backward message has the options of its forward message
            facts += f" {self.texts}"
        self._fingerprint = wire.fingerprint(facts)
        return wire.head(self._fingerprint)

    def _length(self) -> int:
        """Return the length of a message on a GPU.

        Messages of different layers must have equal lengths, because NCCL does not check them. So
        zeros pad every message to the longest one that the ranks have agreed on.
        """
        return max(self._channel.longest, self._payload_slice.stop)

    def _on_device(self, numbers: Array, reduce: Callable[[Array], Array], copied: bool) -> Array:
        """Sum a message on a GPU and return its payload; the head is checked later."""
        if is_captured(numbers):
            return reduce(numbers)[self._payload_slice]
        self._channel.deferred_checks.check_if_due(IN_GRAPH_MEMORY if copied else None)
        summed = reduce(numbers)
        kind = IN_GRAPH_MEMORY if copied else (summed.shape, summed.device, stream_of(summed))
        check = partial(type(self).check, self._proxy, self._calls[0])
        self._channel.deferred_checks.add(summed, kind, self._expected, check)
        return summed[self._payload_slice]

    def check(self, number: int, summed: HostArray) -> None:
        """Raise on all ranks if the messages of an earlier call, summed on a GPU, do not match.

        `number` is the number of that call; the layer may have been called again since.
        """
        call, head = self._call(number), summed[: wire.HEAD].tolist()
        if wire.is_refused(head):
            diagnostics.raise_for_refusal(self, head[:1], f"an earlier call, {call}")
        if self.name == "forward":
            payload = summed[self._payload_slice]
            nonfinite.raise_if_nonfinite(self, self.dtype, payload, earlier=call)
        if not wire.all_equal(head, self._size):
            diagnostics.log_and_raise(
                RuntimeError,
                f"the ranks were in different places in an earlier call, {call}, on "
                f"rank {self.rank}: another rank ran a different layer, dtype or options, or only "
                f"some ranks computed gradients. {diagnostics.SAME_LAYERS_ADVICE}",
            )
