"""The messages of one layer, which tell whether all ranks are in the same layer.

A sum of unlike messages is a silent wrong number where their lengths agree; where not, the sum ends
the process inside the transport. So a layer's first message has the same length for all layers, and
compares the layers' names, sizes and versions; each later message carries a fingerprint of what the
rank is doing (see `multibn.message`). All ranks see the same sums, so that all of them turn to ask
each other in the same moment.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
from array_api_compat import is_cupy_array

from multibn import message
from multibn._arrays import from_host, is_on_host, to_host
from multibn._typing import Array
from multibn.communicators.agreement import Agreement, sum_of
from multibn.communicators.base import Communicator, Forwarding, SingleProcess
from multibn.communicators.lines import HostArray
from multibn.communicators.names import by_answer, for_people
from multibn.communicators.objects import gather
from multibn.communicators.watch import fail
from multibn.message import Message


class Conversation(Forwarding):
    """A communicator as one layer uses it.

    Parameters
    ----------
    communicator
        The processes.
    find_name
        Returns the name of the layer, the same on all ranks; called when the layer first
        communicates.
    options
        Returns what must be equal on all ranks, beside the name; called as `find_name`.
    num_layers
        How many layers share each message.
    """

    names: Sequence[str] = ()  # of the layers that share each message, if several do

    def __init__(
        self,
        communicator: Communicator,
        find_name: Callable[[], str],
        *,
        options: Callable[[], Mapping[str, object]] = dict,
        num_layers: int = 1,
    ) -> None:
        self.wrapped = communicator
        self.options, self.num_layers = options, num_layers
        self.forwarding = communicator if isinstance(communicator, Forwarding) else None
        self._find_name = find_name
        self._name: str | None = None
        self.phases: dict[tuple[str, Any], Phase] = {}
        self._elsewhere: dict[Communicator, Conversation] = {}

    @property
    def name(self) -> str:
        """The name of the layer."""
        if self._name is None:
            self._name = self._find_name()
        return self._name

    @property
    def num_forward(self) -> int:
        """How many forward messages the layer has sent."""
        return sum(phase._calls for phase in self.phases.values() if phase.name == "forward")

    def _look_up(self) -> Communicator:
        return self.wrapped

    def over(self, communicator: Communicator) -> "Conversation":
        """The same layer's conversation over other processes."""
        if communicator not in self._elsewhere:
            self._elsewhere[communicator] = Conversation(
                communicator,
                lambda: self.name,
                options=self.options,
                num_layers=self.num_layers,
            )
        return self._elsewhere[communicator]

    def during(self, phase: str, dtype: Any) -> "Phase":
        """The communicator for messages about activations of `dtype` in a phase of the layer."""
        known = self.phases.get((phase, dtype))
        if known is None:
            known = self.phases[phase, dtype] = Phase(self, phase, dtype)
        return known


def during(communicator: Communicator, phase: str, dtype: Any, /) -> Communicator:
    """`Conversation.during` of a layer's communicator; any other communicator as it is."""
    if isinstance(communicator, Conversation):
        return communicator.during(phase, dtype)
    return communicator


class Phase(Forwarding):
    """A layer's communicator in one phase."""

    def __init__(self, layer: Conversation, phase: str, dtype: Any) -> None:
        self.wrapped = layer
        self.name, self.dtype = phase, str(dtype).rpartition(".")[2]
        self.num_lanes = message.num_lanes(phase, layer.num_layers)
        self._calls = 0
        self._agreed: Agreement | None = None
        self._unread: Callable[[], HostArray | None] | None = None
        self._pinned: dict[Any, tuple[Any, HostArray, Any]] = {}

    def _look_up(self) -> Conversation:
        return self.wrapped

    def buffer(self, n: int) -> HostArray | None:
        """Memory for a payload of `n` numbers, which `allreduce` sends without a copy.

        None where the communicator has no lines. Collective at the first call.
        """
        agreed = self._agree(n)
        if agreed.size == 1:
            memory = np.empty(n)
            # A user's own class may do anything, and is called.
            if agreed.lines is not None or type(agreed.communicator) is SingleProcess:
                agreed.payload = memory
            return memory
        if agreed.lines is None:
            return None
        return agreed.payload if agreed.payload is not None else agreed.open(self.next_call())

    def message(self, n: int, like: Array) -> Message | None:
        """Memory on a torch GPU for a message with a payload of `n` numbers; `allreduce` takes it.

        None where such a message would go through host memory. Collective at the first call.
        """
        return self._agree(n).message(like)

    def allreduce(self, x: Array | Message, /) -> Array:
        """Sum a payload; raise on all ranks if the ranks are in different places.

        Memory that `buffer` returned is summed in place, and stays valid until the next message; so
        is a `message`, whose memory is its own.
        """
        agreed = self._agreed
        if isinstance(x, Message):
            assert agreed is not None
            self._calls += 1
            return self._allreduce_array(agreed, x)
        if agreed is None or x is not agreed.payload:
            agreed = self._agree(x.shape[0])
        self._calls += 1
        if agreed.size == 1:
            return x if x is agreed.payload else agreed.communicator.allreduce(x)
        call = _Call((self, self._calls))
        payload = agreed.payload
        if payload is None or x is not payload:
            if agreed.lines is None or agreed.communicator.takes(x):
                return self._allreduce_array(agreed, x)
            payload = agreed.open(call)
            payload[:] = to_host(x)
        mine = None if x is payload or is_on_host(x) else payload.copy()
        assert agreed.lines is not None
        agreed.tail[:] = agreed.sent_tail
        agreed.lines.exchange(agreed.buffer, agreed.place, call, agreed.communicator.timeout)
        if agreed.summed_prints.tolist() != agreed.fingerprints:
            self._check(agreed.buffer, agreed.size)
        if mine is not None and self.name == "forward" and not np.isfinite(payload).all():
            # The caller does not look at numbers on a GPU, and these are in host memory.
            if message.is_refusal(payload):
                raise_for_refusal(self, refused=message.is_refusal(mine))
            elif skips(self, self.dtype):
                tell_of_skip(self, bool(np.isfinite(mine).all()))
            else:
                raise_for_non_finite(self, bool(np.isfinite(mine).all()))
        return payload if x is payload else from_host(payload.copy(), x)

    def __str__(self) -> str:
        return str(_Call((self, self._calls)))

    def next_call(self) -> "_Call":
        return _Call((self, self._calls + 1))

    def _allreduce_array(self, agreed: Agreement, x: Array | Message) -> Array:
        """Over a communicator that is handed arrays: a GPU's transport, or a user's own class."""
        on_host = not isinstance(x, Message) and is_on_host(x)
        if self._unread is not None:
            unread, self._unread = self._unread, None
            previous = unread()
            if previous is not None:
                self._check(previous, agreed.size, latest=False)
        if isinstance(x, Message):
            start = x.start
            summed = agreed.allreduce(x.numbers)
        else:
            numbers = to_host(x) if on_host else x
            before, after = agreed.around(numbers)
            start = before.shape[0]
            summed = sum_of(message.concat([before, numbers, after]), agreed.communicator, self)
        payload = summed[start : -self.num_lanes]
        if on_host:
            self._check(summed, agreed.size)
            return from_host(payload, x)
        self._unread = _copy_to_host(summed, self._pinned)
        return payload

    def _check(self, summed: HostArray, size: int, *, latest: bool = True) -> None:
        """Raise on all ranks unless the messages that were summed belong together.

        The caller looks at the numbers of the latest message, this method at earlier ones.
        """
        if not latest and self.name == "forward" and not np.isfinite(summed).all():
            refused = message.is_refusal(summed, self.num_lanes)
            if refused or not skips(self, self.dtype):
                self._raise_for_previous(refused)
            tell_of_skip(self)
        v, square = summed[-2:].tolist()
        if not message.all_equal(v, square, size) and not (
            # The refused input may be of another dtype, which the fingerprint tells.
            self.name == "forward" and message.is_refusal(summed, self.num_lanes)
        ):
            self._raise_for_places(latest)

    def _raise_for_places(self, latest: bool) -> NoReturn:
        """Ask each other where the ranks are, and raise on all of them. Collective."""
        if not latest:  # the ranks have gone on since, and may be in the same layer again
            fail(
                RuntimeError,
                f"the ranks were in different places in the previous call of {self}, on rank "
                f"{self.rank}: another rank was in another layer, or in another dtype. All ranks "
                "must run the same layers in the same order, in training or not.",
            )
        assert self._agreed is not None
        layer = self.wrapped
        length = self._agreed.num_numbers + self.num_lanes
        num_channels = message.num_channels(length, layer.num_layers)
        answers = gather(f"{self}, {num_channels} channels", layer.wrapped)
        names = [answer.rpartition(", ")[0] for answer in answers]
        if len(set(names)) > 1:  # otherwise two models have layers of one name
            answers = names
        fail(
            RuntimeError,
            f"the ranks are in different places: {by_answer(answers)}. All ranks must run the "
            "same layers in the same order, with the same dtype, in training or not.",
        )

    def _raise_for_previous(self, refused: bool) -> NoReturn:
        where = f"in the previous call of {self}"
        if refused:
            fail(
                RuntimeError,
                f"rank {self.rank} cannot go on: {where}, the input was refused on another "
                "rank. The error raised there says why.",
            )
        fail(
            FloatingPointError,
            f"the batch statistics were not finite {where}: the input had NaN, infinity or too "
            "large values on some rank. Look for their origin in the layers before this one.",
        )

    def _agree(self, n: int) -> Agreement:
        """Learn that all ranks are in a layer like this one; collective where that is not known."""
        layer, agreed = self.wrapped, self._agreed
        communicator: Any = (
            layer.wrapped if layer.forwarding is None else layer.forwarding.resolve()
        )
        if (
            agreed is None
            or agreed.communicator is not communicator
            or agreed.num_numbers != n
            # torch's default process group may have been made anew.
            or (agreed.lines is not None and agreed.lines is not communicator.lines)
        ):
            agreed = self._agreed = Agreement.make(self, communicator, n)
        return agreed


class _Call(tuple[Phase, int]):
    """One call of a layer in one phase, by its number; for people."""

    __slots__ = ()

    def __str__(self) -> str:
        phase, number = self
        return f"{for_people(phase.wrapped.name)} ({phase.name}, {phase.dtype}, call {number})"


def _copy_to_host(
    summed: Array, pinned: dict[Any, tuple[Any, HostArray, Any]]
) -> Callable[[], HostArray | None] | None:
    """Begin to copy a message from a GPU, and return what waits for the copy.

    The copy is looked at before the next message of the same layer and phase is sent. By then it
    has long arrived, so that nothing waits; and all ranks look at the same moment, so that they can
    go on to ask each other. None while a CUDA graph is captured, in which no copy can be looked at,
    and no event waited for: what waits returns None then. `pinned` keeps memory and an event for
    the messages of each device and length.
    """
    capturing: Callable[[], bool]
    if getattr(summed, "is_cuda", False):  # torch's
        import torch

        capturing = torch.cuda.is_current_stream_capturing
        if capturing():
            return None
        key = summed.device, summed.shape  # an event is of the GPU on which it was recorded first
        if key not in pinned:
            memory = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True)
            # torch.cuda.Event looks the current stream up in Python.
            pinned[key] = memory, memory.numpy(), torch.Event(summed.device)
        memory, copy, event = pinned[key]
        memory.copy_(summed, non_blocking=True)
        is_current = summed.get_device() == torch.cuda.current_device()
        event.record(None if is_current else torch.cuda.current_stream(summed.device))
    elif is_cupy_array(summed):
        import cupy
        import cupyx

        def capturing() -> bool:
            return bool(cupy.cuda.get_current_stream().is_capturing())

        if capturing():
            return None
        copy, event = cupyx.empty_pinned(summed.shape, summed.dtype), cupy.cuda.Event()
        summed.get(out=copy, blocking=False)
        event.record()
    else:
        copied = to_host(summed)
        return lambda: copied

    def wait() -> HostArray | None:
        if capturing():
            return None
        event.synchronize()
        return copy

    return wait


def _layer_of(communicator: Any) -> Conversation | None:
    """The conversation of the layer that uses the communicator."""
    while not isinstance(communicator, Conversation | None):
        communicator = getattr(communicator, "wrapped", None)
    return communicator


def name_of(communicator: Any, /) -> str:
    """The name of the layer that uses the communicator, for people."""
    layer = _layer_of(communicator)
    return "a layer" if layer is None else for_people(layer.name)


# What a layer does with a batch that is not finite. None: "skip" for float16, else "raise".
Nonfinite: TypeAlias = Literal["raise", "skip", None]


def skips(communicator: Any, dtype: Any, /) -> bool:
    """Whether a layer skips a batch that is not finite; `dtype` is what the message announces."""
    layer = _layer_of(communicator)
    if layer is None:
        return False
    # "nonfinite" of a layer, "nonfinite of conv1.bn" and so on of several in one message.
    policies = {v for option, v in layer.options().items() if option.split()[0] == "nonfinite"}
    is_float16 = {*str(dtype).rpartition(".")[2].split(", ")} == {"float16"}
    return policies == {"skip"} or (is_float16 and "raise" not in policies)


# The layer that told of a skipped batch last, and how many forward messages it had sent by then.
_told: tuple[weakref.ref[Conversation], int] | None = None


def tell_of_skip(communicator: Any, finite: bool | None = None, /) -> None:
    """Warn that a layer skips a batch, once for all layers through which NaN goes in a step.

    `finite` says whether this rank's input is; None where nobody knows any more. Not collective.
    """
    global _told
    layer = _layer_of(communicator)
    assert layer is not None
    first = None if _told is None else _told[0]()
    if _told is not None and first is not None and first.num_forward == _told[1]:
        return
    _told = weakref.ref(layer), layer.num_forward
    where = {True: "another rank, which says so", False: "this rank", None: "some rank"}[finite]
    warnings.warn(
        f"rank {communicator.rank} of {communicator.size} has skipped a batch in "
        f"{name_of(layer)}, as all ranks have: the input has NaN, infinity or too large values on "
        f"{where}. The output is NaN, and no statistics have moved. A GradScaler skips such a "
        'step; without one, pass nonfinite="raise".',
        RuntimeWarning,
        stacklevel=2,
    )


def find_ranks(communicator: Any, flag: bool, /) -> list[int]:
    """The ranks that passed True. Collective, and no message of a layer.

    For the way to an error: the message has as many numbers as there are ranks.
    """
    while hasattr(communicator, "wrapped"):
        communicator = communicator.wrapped
    flags = np.zeros(communicator.size)
    flags[communicator.rank] = flag
    return [int(rank) for rank in np.flatnonzero(communicator.allreduce(flags))]


def raise_for_refusal(communicator: Communicator, *, refused: bool) -> None:
    """Find out together which ranks refused their input; the others raise. Collective."""
    ranks = find_ranks(communicator, refused)
    if not refused:
        fail(
            RuntimeError,
            f"rank {communicator.rank} cannot go on: the input of {name_of(communicator)} was "
            f"refused on rank(s) {ranks} of {communicator.size}. The error raised there says "
            "why.",
        )


def raise_for_nan_gradients(communicator: Communicator, has_nan: bool) -> None:
    """Raise on all ranks if the gradient of a layer's output has NaN on any of them.

    Without this, the gradient of the input is NaN on all ranks, and nobody is told where NaN came
    in. Collective, and no message of a layer: for debugging, on all ranks or on none.
    """
    ranks = find_ranks(communicator, has_nan)
    if ranks:
        fail(
            FloatingPointError,
            f"the gradient of the output of {name_of(communicator)} has NaN on rank(s) {ranks} of "
            f"{communicator.size}. Look for their origin in the layers after, and in the loss.",
        )


def raise_for_non_finite(communicator: Communicator, finite: bool) -> NoReturn:
    """Find out together on which ranks the moments are not finite, and raise. Collective."""
    ranks = find_ranks(communicator, not finite)
    fail(
        FloatingPointError,
        f"the batch statistics of {name_of(communicator)} are not finite: the input has NaN, "
        f"infinity or too large values on rank(s) {ranks} of {communicator.size}. Look for "
        "their origin in the layers before.",
    )
