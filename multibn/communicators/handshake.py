"""The handshake in a layer's first message: are all ranks in the same layer of the same model?

The handshake compares the layers' names, channels and options, and the versions of multibn.
"""

from typing import Any, NoReturn

import numpy as np

from multibn import _version, wire
from multibn.communicators.channel import Compared, check_kinds, resolved
from multibn.communicators.communicator import gather
from multibn.communicators.diagnostics import (
    SAME_LAYERS_ADVICE,
    UNUSED_LAYER_ADVICE,
    display_name,
    group_ranks_by,
    log_and_raise,
    raise_for_places,
    raise_for_sum,
)


def handshake(layer: Any, group: Any, channels: int, call: object) -> tuple[str, int]:
    """Return the layer's name and number, which are the same on all ranks of the group.

    Layers are numbered in the order of their first messages. Collective if the ranks have not yet
    compared the layer for this number of channels.
    """
    channel = group.channel
    compared: Compared = channel.compared if layer.is_function else layer.compared

    def key() -> tuple[str, int, str]:  # without a layer's name, which a copy may change
        return channel.watchdog.token, channels, layer.name if layer.is_function else ""

    if key() not in compared:
        options = layer.texts | {"channels": f"{channels} channels{layer.detail(channels)}"}
        facts = f"{_version.__version__} {layer.name} {channels} {sorted(options.items())}"
        text = f"the first message of {call}"
        is_same, _ = all_ranks_agree(group, "first message", facts, text=text)
        name = layer.name if is_same else raise_unless_compatible(layer, group, options)
        channel.num_first_messages += 1
        channel.deferred_checks.batch_size = max(channel.num_first_messages, 4)
        channel.longest = max(channel.longest, wire.length(channels))
        compared[key()] = name, channel.num_first_messages  # the first message has set the token
    return compared[key()]


def all_ranks_agree(
    communicator: Any, kind: str, facts: str = "", *, text: str = "", mark: float = 0.0
) -> tuple[bool, float]:
    """Return whether all ranks pass the same `facts`, and the sum of their `mark`s.

    Raises on all ranks if some send a message of a different `kind`, a layer's for example. Error
    messages use `text` for this rank's place. Collective: one allreduce.
    """
    group = resolved(communicator)
    if group.size == 1:
        return True, mark
    total = group.channel.allreduce_checked(np.array([mark]), kind, facts, text)
    return total is not None, 0.0 if total is None else float(total[0])


def raise_unless_compatible(layer: Any, group: Any, options: dict[str, str]) -> str:
    """Raise if the ranks' layers are incompatible; otherwise return the name to use. Collective."""
    facts = _version.__version__, layer.path, layer.name, options
    versions, paths, names, all_options = zip(*gather(facts, group), strict=True)
    if len(set(versions)) > 1:
        log_and_raise(
            RuntimeError,
            "the ranks must run the same version of multibn: "
            f"{group_ranks_by(versions, 'with')}. Install one version everywhere.",
        )
    # A layer that is called outside its model has no path. On one rank, the model may be part of a
    # larger module.
    found = [path for path in paths if path] or names
    shortest = min(found, key=len)
    if not all(f".{path}".endswith(f".{shortest}") for path in found):
        raise_for_places(map(display_name, names))
    # A rank whose arguments are invalid reports no options.
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
    return str(shortest)


def raise_for_mismatch(phase: Any, group: Any, head: Any) -> NoReturn:
    """Raise on all ranks after a message whose heads differ: name each rank's place. Collective.

    `head` is the sum of the heads, which also shows whether a rank rejected its input.
    """
    check_kinds(group, "layer", str(phase), head)
    calls = f"{phase}", *(f"{phase}, {fact}" for fact in phase.facts)
    places, texts, gradients, *others = zip(*gather([phase.place, *calls], group), strict=True)
    if len({*places}) == 1:
        raise_unless_compatible(phase.layer, group, phase.texts)
        if len({*gradients}) == 1:
            native = getattr(group, "native", group)
            raise_for_sum(native, f"a different sum in {phase}")
        log_and_raise(
            RuntimeError,
            f"only some ranks compute gradients: {group_ranks_by(gradients)}. Ranks with gradients "
            "would wait in backward for the others: compute gradients on all ranks or on none, and "
            "freeze the same layers on all of them. A rank that validates must be in evaluation: "
            "model.eval(), or in Chainer chainer.using_config('train', False).",
        )
    # Name the places without details, unless only a detail differs.
    texts = next(each for each in (texts, *others) if len({*each}) > 1)
    are_backward = all("(backward, " in text for text in texts)
    raise_for_places(texts, UNUSED_LAYER_ADVICE if are_backward else SAME_LAYERS_ADVICE)
