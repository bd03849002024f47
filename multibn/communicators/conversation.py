"""The messages of one layer, which tell whether all ranks are in the same layer.

A sum of unlike messages is a silent wrong number where their lengths agree; where not, the sum ends
the process inside the transport. So a layer's first message has the same length for all layers, and
compares the layers (see `agreement`); each later message carries a fingerprint of what the
rank is doing (see `multibn.message`). All ranks see the same sums, so that all of them turn to ask
each other in the same moment.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from multibn.communicators.agreement import Built, Known, compare, known_of
from multibn.communicators.base import Communicator, Forwarding
from multibn.communicators.lines import Lines
from multibn.communicators.phase import Phase


class Conversation(Forwarding):
    """A communicator as one layer uses it.

    `find_name` returns the name of the layer, `options` what else must be equal on all ranks; both
    are called when the layer first communicates. `built` is which of the process's layers it is;
    None for a function.
    """

    def __init__(
        self,
        communicator: Communicator,
        find_name: Callable[[], str],
        *,
        built: Built | None = None,
        options: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.wrapped = communicator
        self.built, self.options = built, options
        self.forwarding = communicator if isinstance(communicator, Forwarding) else None
        self._find_name = find_name
        self.phases: dict[tuple[str, Any, bool], Phase] = {}
        self._elsewhere: dict[Communicator, Conversation] = {}
        # The names that the layer has in each group, by its own name and the messages' length.
        self._names: WeakKeyDictionary[Known, dict[Any, str]] = WeakKeyDictionary()

    @cached_property
    def name(self) -> str:
        """The name of the layer."""
        return self._find_name()

    @property
    def num_messages(self) -> int:
        """How many messages the layer has sent."""
        return sum(phase._calls for phase in self.phases.values())

    def _look_up(self) -> Communicator:
        return self.wrapped

    def over(self, communicator: Communicator) -> "Conversation":
        """The same layer's conversation over other processes."""
        if communicator not in self._elsewhere:
            self._elsewhere[communicator] = Conversation(
                communicator, lambda: self.name, built=self.built, options=self.options
            )
        return self._elsewhere[communicator]

    def during(self, phase: str, dtype: Any, needs_gradient: bool = True) -> "Phase":
        """The communicator for messages about activations of `dtype` in a phase of the layer.

        `needs_gradient` says whether a backward message may follow.
        """
        key = phase, dtype, needs_gradient
        known = self.phases.get(key)
        if known is None:
            known = self.phases[key] = Phase(self, *key)
        return known

    def agreed_name(
        self, communicator: Any, lines: Lines | None, length: int, call: object
    ) -> tuple[str, Known]:
        """The layer's name among these ranks, no other layer's, and what else they know.

        Collective where the layer has not compared itself for messages of this length.
        """
        known = known_of(communicator, lines)
        names, key = self._names.setdefault(known, {}), (self.name, length)
        if self.built is None:  # a function, whose conversations last as long as a call
            names = known.names
        if key not in names:
            names[key] = known.next_name(compare(self, communicator, lines, length, call), length)
        return names[key], known


def during(communicator: Communicator, phase: str, dtype: Any, /) -> Communicator:
    """`Conversation.during` of a layer's communicator; any other communicator as it is."""
    if isinstance(communicator, Conversation):
        return communicator.during(phase, dtype)
    return communicator
