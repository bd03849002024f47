"""The comparison in a layer's first message: all ranks have come to the same layer of one model.

The first message compares the layers' names, widths and options, which of the process's layers each
is, and the versions of this package.
"""

import gc
from itertools import count
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from multibn import _version, wire
from multibn._typing import Array
from multibn.communicators.channel import (
    ChannelCommunicator,
    HostArray,
    channel_of,
    raise_for_kinds,
)
from multibn.communicators.communicator import check_members, checked_sum, gather, resolved
from multibn.communicators.diagnostics import (
    display_name,
    group_ranks_by,
    log_and_raise,
)
from multibn.communicators.unread import Unread


class LayerId:
    """Which of this process's layers one is: two models of one architecture have the same names.

    A copy or a pickle of a layer has the number of its original, and no part in the numbers of
    other layers, so that one rank may make copies of its own.
    """

    num_layers = 0  # without copies
    _orders = count()
    _alive: "WeakSet[LayerId]" = WeakSet()

    def __init__(self, original: int | None = None) -> None:
        self.is_copy = original is not None
        if original is None:
            LayerId.num_layers += 1
        self.number = original or LayerId.num_layers
        self._order = next(self._orders)
        self._alive.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerId, (self.number,)

    def __str__(self) -> str:
        what = "a copy of the layer" if self.is_copy else "the layer"
        return f"{what} built as number {self.number}"

    def place(self) -> tuple[int, int]:
        """How many older layers are alive, of all without copies, and of copies of this one.

        Equal on ranks of which one alone has made, and deleted, further layers before this one.
        """
        gc.collect()
        alive = list(self._alive)
        older = sum(not b.is_copy and b.number < self.number for b in alive)
        return older, sum(b.number == self.number and b._order < self._order for b in alive)


class GroupState:
    """The comparisons of the layers of a group of ranks, equal on all of them."""

    def __init__(self) -> None:
        # Of what is no layer, but a function: by what was compared, the name and number found.
        self.names: dict[Any, tuple[str, int]] = {}
        self.longest = 0  # of the messages that were agreed on
        self.unread = Unread()  # messages that GPUs have summed
        self.count = 0  # of first messages


_known: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()


def look_at_unread() -> None:
    """Look at all messages that GPUs have summed: at a run's last ones no later call looks.

    Not collective. Raises as the layers do, on all ranks that took part in a message.
    """
    for known in list(_known.values()):
        known.unread.look()


def handshake(layer: Any, group: Any, channels: int, call: object) -> tuple[str, int, GroupState]:
    """The layer's name and number among these ranks, and what else they know.

    Layers are numbered by their first messages. Collective where the layer has not compared itself
    with so many channels.
    """
    known = _known_of(group, layer.own_known)
    # A function's comparison lasts as long as a call.
    names = known.names if layer.built is None else layer.names.setdefault(known, {})
    key = layer.name, channels
    if key not in names:
        # Ranks without a channel may be threads of one process, which count each other's layers.
        built = None if channel_of(group) is None else layer.built
        options = layer.texts() | {"channels": f"{channels} channels{layer.detail(channels)}"}
        facts = f"{_version.__version__} {layer.name} {channels} {built} {sorted(options.items())}"
        text = f"the first message of {call}"
        is_alike, _ = agree(group, "first message", facts, text=text, known=known)
        name = layer.name if is_alike else explained(layer.name, group, built, options)
        known.count += 1
        known.unread.together = max(known.count, 4)
        known.longest = max(known.longest, wire.length(channels))
        names[key] = str(name), known.count
    return *names[key], known


def _known_of(group: Any, otherwise: GroupState) -> GroupState:
    try:
        return _known.setdefault(channel_of(group) or group, GroupState())
    except TypeError:  # no hash, or no weak references: each layer compares for itself
        return otherwise


def agree(
    communicator: Any,
    kind: str,
    facts: str = "",
    *,
    text: str = "",
    mark: float = 0.0,
    known: GroupState | None = None,
) -> tuple[bool, float]:
    """Whether all ranks bring equal facts to messages of one kind, and the sum of their marks.

    Raises on all ranks if some are in messages of another kind, a layer's for example: without a
    channel these would meet in the transport, and so all are as long as the longest that the ranks
    have agreed on. `text` says to people where this rank is. Collective: one allreduce.
    """
    group = resolved(communicator)
    if group.size == 1:
        return True, mark
    channel = channel_of(group)
    if channel is not None:
        total = channel.compare(np.array([mark]), kind, facts, text)
        return total is not None, 0.0 if total is None else float(total[0])
    if not (isinstance(group.rank, Integral) and isinstance(group.size, Integral)):
        check_members(group)
    known = known or _known_of(group, GroupState())
    numbers: HostArray = np.zeros(max(known.longest, wire.HEAD + 1))
    numbers[: wire.HEAD] = mine = wire.head(wire.fingerprint(kind + facts))
    numbers[wire.HEAD] = mark
    summed = checked_sum(numbers, group)
    head = summed[: wire.HEAD].tolist()
    if head == [group.size * v for v in mine]:
        return True, float(summed[wire.HEAD])
    raise_for_kinds(group, kind, text or kind, head)
    return False, 0.0


def confirm_place(communicator: Any, place: str) -> None:
    """Raise on all ranks unless all are in this place, before a message that is no layer's.

    A channel tells in the message itself. To a user's own class arrays go as they are, and would be
    added to a layer's: collective there, one allreduce.
    """
    group = resolved(communicator)
    if not isinstance(group, ChannelCommunicator):
        agree(group, place)


def allreduce_at(communicator: Any, x: Array, place: str) -> Array:
    """Sum `x` over ranks that are all in this place, which errors name. Collective."""
    confirm_place(communicator, place)
    group = resolved(communicator)
    is_ours = getattr(type(group), "allreduce", None) is ChannelCommunicator.allreduce
    summed: Array = group.allreduce_at(x, place) if is_ours else group.allreduce(x)
    return summed


def explained(name: str, group: Any, built: LayerId | None, options: dict[str, str]) -> str:
    """The name for a layer whose first messages differ; most differences are errors. Collective."""
    facts = _version.__version__, name, f"{built} of {LayerId.num_layers}", options
    versions, names, built_as, all_options = zip(*gather(facts, group), strict=True)
    if len(set(versions)) > 1:
        log_and_raise(
            RuntimeError,
            "the ranks must run the same version of multibn: "
            f"{group_ranks_by(versions, 'with')}. Install one version everywhere.",
        )
    shortest = min(names, key=len)
    # One rank may have the model inside another module.
    if not all(name == shortest or name.endswith("." + shortest) for name in names):
        log_and_raise(
            RuntimeError,
            "the ranks are in different places: "
            f"{group_ranks_by(map(display_name, names))}. All ranks must run the same layers in "
            "the same order.",
        )
    # A rank that refuses its arguments names none.
    differing = [
        name
        for name in dict.fromkeys(name for each in all_options for name in each)
        if len({each[name] for each in all_options if name in each}) > 1
    ]
    if differing:
        answers = (", ".join(each.get(v, f"no {v}") for v in differing) for each in all_options)
        log_and_raise(
            ValueError,
            f"the ranks have built {display_name(shortest)} differently: "
            f"{group_ranks_by(answers, 'with')}. Build the same model on all ranks.",
        )
    if built is not None and len(set(built_as)) > 1:
        places = gather(built.place(), group)
        if any(place != places[0] for place in places):
            log_and_raise(
                RuntimeError,
                f"the ranks are in different models, at {display_name(shortest)}: "
                f"{group_ranks_by(built_as)}. All ranks must build the same models in the "
                "same order, and call them in the same order. Build a model that one rank alone "
                "needs after "
                "the others, or copy it from one of them by copy.deepcopy.",
            )
    return str(shortest)
