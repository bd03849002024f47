"""What the ranks agree on before a layer's messages: that all of them are in the same layer."""

from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from array_api_compat import is_array_api_obj

from multibn import _version, message
from multibn._arrays import array_namespace, device, from_host, to_host
from multibn._typing import Array
from multibn.communicators.lines import FIRST_MESSAGES, HostArray, LineCommunicator, Lines
from multibn.communicators.names import by_answer, for_people
from multibn.communicators.objects import gather
from multibn.communicators.watch import fail


class Agreement:
    """What goes with a layer's messages of `num_numbers` in one phase, among some processes."""

    def __init__(
        self,
        communicator: Any,
        lines: Lines | None,
        size: int,
        num_numbers: int,
        place: str,
        lanes: list[float],
        agreements: MutableMapping[Any, str],
    ) -> None:
        self.communicator, self.lines, self.size = communicator, lines, size
        self.num_numbers, self.place = num_numbers, place
        self.lanes: HostArray = np.array(lanes)
        self.fingerprint = lanes[-2] if lanes else 0.0
        # What all ranks together send if each sends the same.
        self.fingerprints = [size * v for v in lanes[-2:]]
        self.buffer: HostArray = np.empty(0)  # of the line, when the line is open
        self.payload: HostArray | None = None  # the first `num_numbers` of the buffer
        # The others, the last two of these, and what a rank sends there. NumPy takes 1.2 us to copy
        # four numbers, memoryviews 0.1.
        self.tail = self.summed_prints = self.buffer.data
        self.sent_tail = self.lanes.data
        self._agreements = agreements
        # In place, unless a user's own class sums.
        in_place = isinstance(communicator, LineCommunicator)
        self.allreduce = communicator.allreduce_in_place if in_place else communicator.allreduce
        # Of messages on a GPU, by the GPU; None where messages go through host memory.
        self._dtypes: dict[Any, Any] = {}
        self._pieces: dict[Any, tuple[Array, Array]] = {}
        self._zeros = -1, 0  # how many layers were known, and the zeros before a message then

    @classmethod
    def make(cls, phase: Any, communicator: Any, n: int) -> "Agreement":
        """About messages of `n` numbers of a layer's `Phase`. Collective for an unknown layer."""
        layer = phase.wrapped
        lines = communicator.lines if isinstance(communicator, LineCommunicator) else None
        size = communicator.size
        if size == 1:
            return cls(communicator, lines, 1, n, "", [], {})
        agreements = _agreements_of(communicator) if lines is None else lines.agreements
        length = n + phase.num_lanes
        name = layer.name
        if (name, length) not in agreements:
            agreements[name, length] = _compare(
                layer, communicator, lines, length, phase.next_call()
            )
        name = agreements[name, length]
        # With the length: layers of one name and unlike widths may meet in a message.
        place = f"{name} {phase.name} {length}"
        fingerprint = message.fingerprint(f"{place} {phase.dtype}")
        lanes = message.lanes(phase.name, fingerprint, layer.num_layers)
        return cls(communicator, lines, size, n, place, lanes, agreements)

    def open(self, call: object) -> HostArray:
        """The payload's memory. Collective at the first call for this length."""
        if self.payload is None:
            assert self.lines is not None
            length = self.num_numbers + self.lanes.size
            self.buffer = self.lines.buffer(length, call, self.communicator.timeout)
            self.payload = self.buffer[: self.num_numbers]
            self.tail = self.buffer[self.num_numbers :].data
            self.summed_prints = self.tail[-2:]
        return self.payload

    def around(self, x: Array) -> tuple[Array, Array]:
        """The zeros before a payload, and the lanes after the payload, as arrays like `x`.

        Without lines, messages of unlike lengths would meet in the transport. The zeros make every
        message as long as the longest that the ranks have agreed on.
        """
        key = type(x), device(x), len(self._agreements)
        if key not in self._pieces:
            zeros = np.zeros(self._num_zeros())
            self._pieces = {key: (from_host(zeros, x), from_host(self.lanes, x))}
        return self._pieces[key]

    def message(self, like: Array) -> message.Message | None:
        """Memory on the device of `like`, a torch tensor, for such a message; see `around`.

        None where such a message would go through host memory.
        """
        device = like.device
        if device not in self._dtypes:
            takes = self.size > 1 and (self.lines is None or self.communicator.takes(like))
            self._dtypes[device] = array_namespace(like).float64 if takes else None
        dtype = self._dtypes[device]
        if dtype is None:
            return None
        num_known, start = self._zeros
        if num_known != len(self._agreements):
            start = self._num_zeros()
        length = start + self.num_numbers + self.lanes.size
        return message.Message(like.new_empty(length, dtype=dtype), start, self.fingerprint)

    def _num_zeros(self) -> int:
        num_known, num_zeros = self._zeros
        if num_known != len(self._agreements):
            own = self.num_numbers + self.lanes.size
            longest = max((length for _, length in self._agreements), default=own)
            num_zeros = max(longest - own, 0)
            self._zeros = len(self._agreements), num_zeros
        return num_zeros


def _compare(layer: Any, communicator: Any, lines: Lines | None, length: int, call: object) -> str:
    """The layer's name, once all ranks are known to be in the same layer. Collective."""
    numbers = np.array(message.first(layer.name, length, _version.__version__))
    if lines is None:
        summed = _sum(numbers, communicator, f"the first message of {call}")
    else:
        text = f"the first message of {call}"
        summed = lines.sum(
            numbers, "first message", text, communicator.timeout, number=FIRST_MESSAGES
        )
    if message.first_agrees(summed, communicator.size):
        return layer.name
    num_channels = message.num_channels(length, layer.num_layers)
    answers = gather((layer.name, num_channels, _version.__version__), communicator)
    names, nums, versions = zip(*answers, strict=True)
    if len(set(versions)) > 1:
        fail(
            RuntimeError,
            "the ranks must run the same version of multibn: "
            f"{by_answer(versions)}. Install one version everywhere.",
        )
    shortest = min(names, key=len)
    # One rank may have the model inside another module.
    if not all(name == shortest or name.endswith("." + shortest) for name in names):
        fail(
            RuntimeError,
            "the ranks are in different places: "
            f"{by_answer(map(for_people, names))}. All ranks must run the same layers in "
            "the same order.",
        )
    if len(set(nums)) > 1:
        answer = by_answer([f"{n} channels" for n in nums])
        fail(
            ValueError,
            f"the ranks have built {for_people(shortest)} differently: {answer}. Build "
            "the same model on all ranks.",
        )
    return str(shortest)


def sum_of(numbers: Array, communicator: Any, message: object) -> Array:
    """The sum by a communicator without lines, whose messages may be of unlike lengths."""
    try:
        return communicator.allreduce(numbers)
    except ValueError as error:  # NumPy's, where a class adds the arrays of the ranks
        fail(
            RuntimeError,
            f"rank {communicator.rank} cannot sum {message}: {error}. The ranks may be in "
            "different places: all ranks must run the same layers in the same order, with a "
            "`mask` or `lengths` on all of them or on none.",
        )


def _sum(numbers: HostArray, communicator: Any, message: str) -> HostArray:
    """By a user's own class, perhaps, whose mistakes would seem to be mistakes of the ranks."""
    own = numbers.tolist()
    summed = sum_of(numbers, communicator, message)
    found = type(summed).__qualname__
    if is_array_api_obj(summed):
        summed = to_host(summed)
        found = f"{summed.dtype} of shape {summed.shape}"
    expected = f"float64 of shape {numbers.shape}"
    if found == expected and summed.tolist() == own:
        found = "the numbers of this rank"
    if found != expected:
        fail(
            TypeError,
            f"`allreduce` of {type(communicator).__qualname__} must return the sum over "
            f"{communicator.size} ranks, an array like its argument, {expected}: got {found} on "
            f"rank {communicator.rank}. Correct this method.",
        )
    return summed


# What the ranks have compared over communicators that have no lines, by the communicator.
_compared: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()


def _agreements_of(communicator: Any) -> MutableMapping[Any, str]:
    try:
        return _compared.setdefault(communicator, {})
    except TypeError:  # no hash, or no weak references: each layer compares for itself
        return {}
