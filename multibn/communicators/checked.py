"""The messages of one layer, which carry what tells whether all ranks are in the same layer.

Sums of unlike things are silent wrong numbers where the sizes agree; where they do not, they end
the process inside of the transport. So a layer's first message has the size that every first
message has, and compares what the layers are; each later one carries a fingerprint v of what the
rank is doing, and v**2: all ranks have sent the same v if and only if W * sum(v**2) = sum(v)**2.
Every rank finds that alike from the sums, so that all of them go on to ask each other.
"""

import sys
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
from array_api_compat import is_torch_array

from multibn._arrays import is_on_host
from multibn._typing import Array
from multibn.communicators import Communicator
from multibn.communicators._handle import Forwarding, Handle, Watched
from multibn.communicators._host import from_host, to_host
from multibn.communicators._objects import gather

_FIRST_MESSAGES = -1  # a channel of their own


class Checked(Handle):
    """A communicator as one layer uses it.

    Parameters
    ----------
    communicator
        The processes.
    find_name
        What the layer is called, the same on all ranks; asked for when it first communicates.
    num_layers
        How many layers' moments its messages have.
    """

    def __init__(
        self, communicator: Communicator, find_name: Callable[[], str], *, num_layers: int = 1
    ) -> None:
        self.wrapped = communicator
        self.num_layers = num_layers
        self._forwarding = communicator if isinstance(communicator, Forwarding) else None
        self._find_name = find_name
        self._name: str | None = None
        self._phases: dict[tuple[str, Any], _Phase] = {}

    @property
    def rank(self) -> int:
        return self.wrapped.rank

    @property
    def size(self) -> int:
        return self.wrapped.size

    def allreduce(self, x: Array, /) -> Array:
        """As the communicator's own, unchecked."""
        return self.wrapped.allreduce(x)

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.wrapped.split(color, key)

    def current(self) -> Any:
        """The communicator that it stands for at the moment."""
        return self.wrapped if self._forwarding is None else self._forwarding.resolve()

    @property
    def name(self) -> str:
        """What the layer is called."""
        if self._name is None:
            self._name = self._find_name()
        return self._name

    def during(self, phase: str, dtype: Any) -> Communicator:
        """The communicator for messages about activations of `dtype` in a phase of the layer."""
        found = self._phases.get((phase, dtype))
        if found is None:
            found = self._phases[phase, dtype] = _Phase(self, phase, dtype)
        return found


def during(communicator: Communicator, phase: str, dtype: Any, /) -> Communicator:
    """`Checked.during` of a layer's communicator; any other communicator as it is."""
    return communicator.during(phase, dtype) if isinstance(communicator, Checked) else communicator


def all_equal(total: Any, total_of_squares: Any, size: int, /) -> bool:
    """Whether `size` whole numbers with these sums are equal (Cauchy-Schwarz).

    For numbers below 2**20, whose sums are exact in float64 for up to 8192 ranks.
    """
    return size * int(total_of_squares) == int(total) ** 2


def name_of(communicator: Any, /) -> str:
    """What the layer is called that uses the communicator."""
    while not isinstance(communicator, Checked):
        if not hasattr(communicator, "wrapped"):
            return "a layer"
        communicator = communicator.wrapped
    return communicator.name


def find_ranks(communicator: Any, flag: bool, /) -> list[int]:
    """The ranks that passed True. Collective, and no message of a layer.

    For the way to an error: its message has as many numbers as there are ranks.
    """
    while hasattr(communicator, "wrapped"):
        communicator = communicator.wrapped
    flags = np.zeros(communicator.size)
    flags[communicator.rank] = flag
    return [int(rank) for rank in np.flatnonzero(communicator.allreduce(flags))]


def find_path(
    part: object, kind: type, named_parts: Callable[[Any], Iterable[tuple[str, object]]], /
) -> str:
    """Where `part` stands in the outermost model of a `kind` whose methods are running now.

    "" if none of them has it; `named_parts(model)` are its parts and where they stand.
    """
    frame = sys._getframe(1)
    running = []
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, kind) and candidate is not part:
            running.append(candidate)
        frame = frame.f_back  # type: ignore[assignment]
    for model in reversed(running):
        for path, found in named_parts(model):
            if found is part:
                return path
    return ""


class _Phase:
    """A layer's communicator in one phase."""

    def __init__(self, layer: Checked, phase: str, dtype: Any) -> None:
        self.wrapped = layer
        self.name, self.dtype = phase, str(dtype).rpartition(".")[2]
        # Sums of gradients are two numbers fewer than moments. With as many in all, ranks in
        # different phases of a layer can be told from what the message says.
        self.num_lanes = 2 + 2 * layer.num_layers * (phase == "backward")
        self._calls = 0
        self._agreed: _Agreed | None = None
        self._unread = _Unread(self)

    @property
    def rank(self) -> int:
        return self.wrapped.rank

    @property
    def size(self) -> int:
        return self.wrapped.size

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.wrapped.split(color, key)

    def allreduce(self, x: Array, /) -> Array:
        communicator = self.wrapped.current()
        size = communicator.size
        if size == 1:
            return communicator.allreduce(x)
        self._calls += 1
        length = x.shape[0] + self.num_lanes
        agreements = communicator.agreements if isinstance(communicator, Watched) else None
        agreed = self._agreed
        if agreed is None or agreed.agreements is not agreements or agreed.length != length:
            agreed = self._agreed = self._agree(communicator, length)
        fingerprint, place = agreed.fingerprint, agreed.place
        if is_on_host(x):
            a = to_host(x)
            n = a.size
            payload = np.zeros(length, dtype=a.dtype)
            payload[:n] = a
            payload[n], payload[n + 1] = fingerprint, fingerprint * fingerprint
            summed = self.send(communicator, payload, place)
            total, total_of_squares = summed[n : n + 2].tolist()
            if not all_equal(total, total_of_squares, size) and not (
                # A rank that has refused its input is told from its NaN in the last number.
                self.name == "forward" and np.isnan(summed[n - 1])
            ):
                self.raise_for_places(communicator)
            return from_host(summed[:n], x)
        if is_torch_array(x):
            return self._unread.allreduce(communicator, x, fingerprint, place)
        return communicator.allreduce(x)

    def raise_for_places(self, communicator: Communicator) -> NoReturn:
        """Ask each other where they are, and raise on all ranks. Collective."""
        said = gather(str(self), communicator)
        raise RuntimeError(
            f"the ranks are in different places: {_by_answer(said)}. All ranks must run the same "
            "layers in the same order, with the same dtype, in training or not."
        )

    def __str__(self) -> str:
        return str(_Call(self, self._calls))

    def send(self, communicator: Communicator, payload: Array, place: str) -> Array:
        if not isinstance(communicator, Watched):
            return communicator.allreduce(payload)
        return communicator.allreduce_in(
            payload, channel=payload.shape[0], place=place, text=_Call(self, self._calls)
        )

    def _agree(self, communicator: Communicator, length: int) -> "_Agreed":
        """Learn that all ranks are in a layer like this; collective where that is not known yet.

        Where the transport is not ours, nothing is compared beforehand.
        """
        name = self.wrapped.name
        agreements = None
        if isinstance(communicator, Watched):
            agreements = communicator.agreements
            key = name, length
            if key not in agreements:
                agreements[key] = self._compare(communicator, length)
            name = agreements[key]
        text = f"{name} {self.name} {self.dtype}"
        fingerprint = float(zlib.crc32(text.encode()) >> 12)
        return _Agreed(agreements, length, fingerprint, f"{name} {self.name}")

    def _compare(self, communicator: Watched, length: int) -> str:
        """The layer's name, once it is known to be the same layer on all ranks."""
        about = np.array(
            [
                zlib.crc32(f"{what}".encode()) >> 12
                for what in (self.wrapped.name, length, _version())
            ]
        )
        summed = communicator.allreduce_in(
            np.concatenate([about, about * about]),
            channel=_FIRST_MESSAGES,
            place="first message",
            text=f"the first message of {self}",
        )
        sums = zip(*summed.reshape(2, -1), strict=True)
        if all(all_equal(total, squares, communicator.size) for total, squares in sums):
            return self.wrapped.name
        num_channels = (length - 2) // 2 - self.wrapped.num_layers
        said = gather((self.wrapped.name, num_channels, _version()), communicator)
        names, nums, versions = zip(*said, strict=True)
        if len(set(versions)) > 1:
            raise RuntimeError(
                f"the ranks must run the same version of multibn: {_by_answer(versions)}. Install "
                "one version everywhere."
            )
        shortest = min(names, key=len)
        # One rank may have the model inside of another module.
        if not all(name == shortest or name.endswith("." + shortest) for name in names):
            raise RuntimeError(
                f"the ranks are in different places: {_by_answer(names)}. All ranks must run the "
                "same layers in the same order."
            )
        if len(set(nums)) > 1:
            answers = _by_answer([f"{n} channels" for n in nums])
            raise ValueError(
                f"the ranks have built {shortest} differently: {answers}. Build the same model on "
                "all ranks."
            )
        return str(shortest)


class _Agreed(NamedTuple):
    """What goes with a layer's messages of one phase and `length`, among some processes."""

    agreements: dict[Any, Any] | None  # of these processes
    length: int
    fingerprint: float
    place: str


class _Call(NamedTuple):
    """One call of a layer in one phase; for people."""

    phase: _Phase
    number: int

    def __str__(self) -> str:
        of = self.phase
        return f"{of.wrapped.name} ({of.name}, {of.dtype}, call {self.number})"


class _Unread:
    """The latest message from a GPU, looked at before the next of the same layer and phase is sent.

    By then it has long come to the host, so that nothing waits for it; and all ranks look at the
    same moment, so that they can go on to ask each other.
    """

    def __init__(self, phase: _Phase) -> None:
        self._phase = phase
        self._latest: tuple[Any, Any] | None = None  # an event, and what is there after it
        self._lanes: dict[Any, Any] = {}

    def allreduce(self, communicator: Communicator, x: Any, fingerprint: float, place: str) -> Any:
        import torch

        observed = x.is_cuda and not torch.cuda.is_current_stream_capturing()
        if observed and self._latest is not None:
            (event, copy), self._latest = self._latest, None
            event.synchronize()
            self._look(communicator, copy.numpy())
        key = x.device, fingerprint
        if key not in self._lanes:
            lanes = [fingerprint, fingerprint * fingerprint]
            padding = [0.0] * (self._phase.num_lanes - 2)
            self._lanes[key] = torch.tensor(lanes + padding, dtype=x.dtype, device=x.device)
        summed = self._phase.send(communicator, torch.cat([x, self._lanes[key]]), place)
        if observed:
            copy = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True)
            copy.copy_(summed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._latest = event, copy
        return summed[: x.shape[0]]

    def _look(self, communicator: Communicator, summed: np.ndarray[Any, Any]) -> None:
        n = summed.size - self._phase.num_lanes
        if self._phase.name == "forward" and not np.isfinite(summed).all():
            where = f"in the previous call of {self._phase}"
            if np.isnan(summed[n - 1]):
                raise RuntimeError(
                    f"rank {communicator.rank} cannot go on: {where}, the input was refused on "
                    "another rank. The error raised there says why."
                )
            raise FloatingPointError(
                f"the batch statistics were not finite {where}: the input had NaN, infinity or too "
                "large values on some rank. Look for what made them in the layers before it."
            )
        if not all_equal(summed[n], summed[n + 1], communicator.size):
            self._phase.raise_for_places(communicator)


@cache
def _version() -> str:
    from importlib.metadata import version

    return version("multibn")


def _by_answer(answers: Iterable[str]) -> str:
    """Which ranks have given which answer, for people."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(rank)
    return "; ".join(f"rank(s) {who} in {answer}" for answer, who in ranks.items())
