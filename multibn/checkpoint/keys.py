"""The keys of a checkpoint: each framework's names of layers and their arrays, and renaming."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from multibn._environment import nearest
from multibn.checkpoint.files import CheckpointError

# New names of layers or arrays by the old ones; None leaves the arrays out.
Names: TypeAlias = Mapping[str, str | None]


class Converted(NamedTuple):
    """A model's state under its new names, and notes: sentences on what is not carried over.

    Attributes
    ----------
    state
        The arrays, by their new names.
    notes
        The sentences.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import chainer_to_torch
    >>> converted = chainer_to_torch({"W": np.ones((2, 3)), "t": np.ones(())}, skip_unknown=True)
    >>> list(converted.state)
    ['weight']
    >>> print(*converted.notes)
    unknown, and left out: 't'.
    """

    state: dict[str, Any]
    notes: tuple[str, ...]


class Words(NamedTuple):
    """A framework's words for the parts of a state."""

    framework: str
    separator: str
    plain: tuple[str, str]  # weight and bias of most layers
    norm: tuple[str, str, str, str, str]  # of batch norm: scale, shift, mean, variance, counter


CHAINER = Words("chainer", "/", ("W", "b"), ("gamma", "beta", "avg_mean", "avg_var", "N"))
TORCH = Words(
    "torch",
    ".",
    ("weight", "bias"),
    ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
)
WORDS = {words.framework: words for words in (CHAINER, TORCH)}


def layers(state: Mapping[str, Any], separator: str) -> dict[str, dict[str, Any]]:
    """By layer, the separator at its end included, a map from the rest of its keys to the value."""
    by_layer: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        leaf = key.rpartition(separator)[2]
        by_layer.setdefault(key.removesuffix(leaf), {})[leaf] = value
    return by_layer


def running_statistics(state: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The keys of running mean, running variance and counter of each layer that has them."""
    return [
        (key, layer + var, layer + counter)
        for *_, mean, var, counter in (TORCH.norm, CHAINER.norm)
        for key in state
        if (layer := key.removesuffix(mean)) != key
        and getattr(state.get(layer + var), "shape", None) == state[key].shape
    ]


def numbered(state: Mapping[str, Any], names: Names, separator: str) -> list[str]:
    """A note on layers whose children have numbers as names, unless `names` renames them."""
    number = re.compile(rf"(^|{re.escape(separator)})\d+(?={re.escape(separator)})")
    containers = dict.fromkeys(
        key[: found.start()] for key in state for found in number.finditer(key)
    )
    carried = [c for c in containers if not any(_is_below(name, c, separator) for name in names)]
    return carried and [
        f"the numbers of the layers in {some(carried)} are carried as they are, which is "
        "right for a ChainList. A chainer.Sequential numbers its links in another order and does "
        "not count functions: name them in `names`, as docs/guides/from-chainermn-to-torch.md says."
    ]


def leave_out(
    state: Mapping[str, Any], names: Names, separator: str, notes: list[str]
) -> dict[str, Any]:
    """The state without the keys that `names` maps to None. Raises if a name matches no key."""
    for name in names:
        if not any(_is_below(key, name, separator) for key in state):
            parents = [layer.rstrip(separator) for layer in layers(state, separator)]
            near = nearest(name, [*state, *parents], 1)
            raise CheckpointError(
                f"every entry of `names` must match a key or a prefix: {name!r} matches none"
                f"{near}. Correct it, or remove it."
            )
    kept = {k: v for k, v in state.items() if _rule(k, names, separator)[1] is not None}
    if len(kept) < len(state):
        notes.append(f"left out by `names`: {some(key for key in state if key not in kept)}.")
    return kept


def rename(
    state: Mapping[str, Any],
    source: Words,
    target: Words,
    names: Names,
    skip_unknown: bool,
    notes: list[str],
) -> Converted:
    """Give every key its new name."""
    old, new = source.separator, target.separator
    unknown: list[str] = []
    origins: dict[str, str] = {}  # the old keys by the new ones
    for layer, leaves in layers(state, old).items():
        known = counterparts(leaves, source, target)
        for leaf in leaves:
            key = layer + leaf
            rule, name = _rule(key, names, old)
            if rule != key:
                rest = layer[len(rule) :].strip(old)
                if leaf not in known or (new != old and new in rest):
                    unknown.append(key)
                    continue
                name = new.join(filter(None, (name, rest.replace(old, new), known[leaf])))
            if not name or not name.isprintable() or name in origins:
                raise CheckpointError(
                    f"every key must get a name of its own: {key!r} becomes {name!r}"
                    f"{f', as {origins[name]!r} does' if name in origins else ''}. Pass another "
                    "name in `names`."
                )
            origins[name] = key
    if unknown and not skip_unknown:
        optimizer = " It looks like an optimizer's file." if {"t", "epoch"} & set(unknown) else ""
        raise CheckpointError(
            f"every key must have a place in {target.framework}: {some(unknown)} "
            f"{'has' if len(unknown) == 1 else 'have'} none.{optimizer} Name them in `names` (None "
            "leaves one out), select the model with `prefix`, or pass skip_unknown=True."
        )
    if not origins:
        raise CheckpointError("holds nothing to convert. Check `prefix` and `names`.")
    if unknown:
        notes.append(f"unknown, and left out: {some(unknown)}.")
    return Converted({name: state[key] for name, key in origins.items()}, tuple(notes))


def counterparts(leaves: Mapping[str, Any], source: Words, target: Words) -> dict[str, str]:
    """The names that a layer's arrays have in `target`, by those in `source`, as far as known."""
    if source is target:
        return {leaf: leaf for leaf in leaves}
    plain, norm = (
        dict(zip(old, new, strict=True))
        for old, new in ((source.plain, target.plain), (source.norm, target.norm))
    )
    if source.norm[2] in leaves:
        return plain | norm
    if source is CHAINER:
        return plain | dict(list(norm.items())[:2])
    weight, bias = (getattr(leaves.get(name), "shape", None) for name in source.plain)
    if weight is None or (len(weight) > 1 and weight != bias):
        return plain
    # Another weight may be of PReLU, RMSNorm, LayerNorm over two axes...
    return norm if len(weight) == 1 and weight == bias else {"bias": "b"}


def _rule(key: str, names: Names, separator: str) -> tuple[str, str | None]:
    """The longest entry of `names` that applies to `key`; without one, "" stays ""."""
    rule = max((n for n in names if _is_below(key, n, separator)), key=len, default="")
    return rule, names.get(rule, "")


def _is_below(key: str, name: str, separator: str) -> bool:
    return not name or key == name or key.startswith(name + separator)


def some(keys: Iterable[str]) -> str:
    """The first six of the keys, for people."""
    quoted = [repr(key) for key in keys]
    more = f" and {len(quoted) - 6} more" if len(quoted) > 6 else ""
    return ", ".join(quoted[:6]) + more
