"""The keys of a checkpoint: names of layers and their arrays, and renaming."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from multibn._environment import nearest
from multibn.checkpoint.files import SEPARATORS, CheckpointError

Names: TypeAlias = Mapping[str, str | None]
"""New names of layers or arrays by the old ones; None leaves the arrays out.

Examples
--------
>>> import numpy as np
>>> from multibn.checkpoint import Names, chainer_to_torch
>>> names: Names = {"predictor/bn": "norm", "predictor/fc8": None}
>>> arrays = {"predictor/bn/gamma": np.ones(8), "predictor/fc8/b": np.zeros(2)}
>>> list(chainer_to_torch(arrays, names=names).state)
['norm.weight']
"""


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


def load_names(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """The `names` of `convert` from a JSON file: an object of strings, or null to leave out.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    CheckpointError
        If the file cannot be read or holds anything else.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from multibn.checkpoint import load_names
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "names.json")
    ...     _ = file.write_text('{"predictor": "", "predictor/fc8": null}')
    ...     load_names(file)
    {'predictor': '', 'predictor/fc8': None}
    """
    try:
        names = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(names, dict) or not all(
            value is None or isinstance(value, str) for value in names.values()
        ):
            raise TypeError("a value is neither a string nor null")
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(
            f'{path}: must be a JSON object of names, such as {{"predictor/bn": "norm"}}: {error}. '
            "Write one, or leave it out."
        ) from error
    return names


def join(separator: str, *parts: str) -> str:
    """Join the parts that are not empty."""
    return separator.join(part for part in parts if part)


def layers(state: Mapping[str, Any], separator: str) -> dict[str, dict[str, Any]]:
    """Map from layer to a map from the last part of its keys to the value."""
    by_layer: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        layer, _, leaf = key.rpartition(separator)
        by_layer.setdefault(layer, {})[leaf] = value
    return by_layer


def numbered(state: Mapping[str, Any], names: Names | None, separator: str) -> list[str]:
    """A note on layers whose children have numbers as names, unless `names` renames them."""
    containers: dict[str, None] = {}
    for key in state:
        *parts, _ = key.split(separator)
        for i, part in enumerate(parts):
            container = join(separator, *parts[:i])
            if part.isdecimal() and not any(_follows(n, container, separator) for n in names or {}):
                containers[container] = None
    if not containers:
        return []
    return [
        f"the numbers of the layers in {_some(containers)} are carried as they are, which is "
        "right for a ChainList. A chainer.Sequential numbers its links in another order and does "
        "not count functions: name them in `names`, as docs/guides/from-chainermn-to-torch.md says."
    ]


def leave_out(
    state: Mapping[str, Any], names: Names | None, separator: str, notes: list[str]
) -> dict[str, Any]:
    """The state without the keys that `names` maps to None. Raises if a name matches no key."""
    names = names or {}
    for name in names:
        if not any(_follows(key, name, separator) for key in state):
            near = nearest(name, [*state, *layers(state, separator)], 1)
            raise CheckpointError(
                f"every entry of `names` must match a key or a prefix: {name!r} matches none"
                f"{near}. Correct it, or remove it."
            )
    rules = {key: _rule(key, names, separator) for key in state}
    kept = {k: v for k, v in state.items() if rules[k] is None or names[rules[k]] is not None}
    if left_out := state.keys() - kept.keys():
        notes.append(f"left out by `names`: {_some(key for key in state if key in left_out)}.")
    return kept


def rename(
    state: Mapping[str, Any],
    source: str,
    target: str,
    leaf_names: Callable[[Mapping[str, Any]], Mapping[str, str]],
    names: Names | None,
    skip_unknown: bool,
    notes: list[str],
) -> Converted:
    """Give every key its new name; `leaf_names` translates the last parts of a layer's keys."""
    old_sep, new_sep = SEPARATORS[source], SEPARATORS[target]
    names, unknown = names or {}, []
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer, leaves in layers(state, old_sep).items():
        known = leaf_names(leaves)
        for leaf, value in leaves.items():
            key = join(old_sep, layer, leaf)
            rule = _rule(key, names, old_sep)
            new = (None if rule is None else names[rule]) or ""
            if rule != key:
                rest = layer[len(rule or "") :].strip(old_sep)
                if leaf not in known or (new_sep != old_sep and new_sep in rest):
                    unknown.append(key)
                    continue
                new = join(new_sep, new, rest.replace(old_sep, new_sep), known[leaf])
            if not new or not new.isprintable() or new in renamed:
                raise CheckpointError(
                    f"every key must get a name of its own: {key!r} becomes {new!r}"
                    f"{f', as {origin[new]!r} does' if new in origin else ''}. Pass another name "
                    "in `names`."
                )
            renamed[new], origin[new] = value, key
    if unknown and not skip_unknown:
        optimizer = " It looks like an optimizer's file." if {"t", "epoch"} & set(unknown) else ""
        raise CheckpointError(
            f"every key must have a place in {target}: {_some(unknown)} "
            f"{'has' if len(unknown) == 1 else 'have'} none.{optimizer} Name them in `names` (None "
            "leaves one out), select the model with `prefix`, or pass skip_unknown=True."
        )
    if not renamed:
        raise CheckpointError("holds nothing to convert. Check `prefix` and `names`.")
    if unknown:
        notes.append(f"unknown, and left out: {_some(unknown)}.")
    return Converted(renamed, tuple(notes))


def _rule(key: str, names: Names, separator: str) -> Any:
    """The entry of `names` that applies to `key`: the longest; None without one."""
    return max((n for n in names if _follows(key, n, separator)), key=len, default=None)


def _follows(key: str, name: str, separator: str) -> bool:
    return not name or key == name or key.startswith(name + separator)


def _some(keys: Iterable[str]) -> str:
    """The first six of the keys, for people."""
    quoted = [repr(key) for key in keys]
    more = f" and {len(quoted) - 6} more" if len(quoted) > 6 else ""
    return ", ".join(quoted[:6]) + more
