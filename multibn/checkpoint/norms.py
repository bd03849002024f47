"""The batch normalization layers in a model's state: names and contents of their arrays."""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from multibn._typing import Array
from multibn.checkpoint import keys
from multibn.checkpoint.files import CheckpointError
from multibn.checkpoint.keys import Names

Counts: TypeAlias = tuple[float, float] | Mapping[str, tuple[float, float]]
"""Elements per channel by which running variances are unbiased: the number in the source and the
number wanted, or such a pair for each layer.

Examples
--------
>>> import math
>>> import numpy as np
>>> from multibn.checkpoint import Counts, chainer_to_torch
>>> counts: Counts = {"bn": (4, math.inf)}  # unbiased by 4 elements; biased is wanted
>>> names = ("gamma", "beta", "avg_mean", "avg_var")
>>> arrays = {f"bn/{name}": np.full(1, 4.0) for name in names} | {"bn/N": np.asarray(0)}
>>> print(chainer_to_torch(arrays, avg_var_count=counts).state["bn.running_var"])
[3.]
"""


class Words(NamedTuple):
    """A framework's names of the arrays of a batch normalization."""

    separator: str
    mean: str
    var: str
    counter: str
    scale: str
    shift: str


CHAINER = Words("/", "avg_mean", "avg_var", "N", "gamma", "beta")
TORCH = Words(".", "running_mean", "running_var", "num_batches_tracked", "weight", "bias")


def translation(source: Words, target: Words) -> dict[str, str]:
    """Map from a source's to a target's name of each array of a layer."""
    return dict(zip(source[1:], target[1:], strict=True))


def checked_layers(state: Mapping[str, Array], words: Words) -> list[str]:
    """Names of the layers with running statistics. Raises if a shape or a counter is not valid."""
    import numpy as np

    norms = []
    for layer, leaves in keys.layers(state, words.separator).items():
        if not {words.mean, words.var} & leaves.keys():
            continue
        arrays = {k: leaves.get(k) for k in (words.mean, words.var)}
        arrays |= {k: leaves[k] for k in (words.scale, words.shift) if k in leaves}
        shapes = {k: None if a is None else a.shape for k, a in arrays.items()}
        shape = next(iter(shapes.values()))
        if shape is None or len(shape) != 1 or set(shapes.values()) != {shape}:
            raise CheckpointError(
                f"the arrays of the batch normalization {layer!r} must have one shape (C,): got "
                f"{', '.join(f'{k} {s}' for k, s in shapes.items())}. Save the model again, or "
                "leave the layer out with `names`."
            )
        for name, array in arrays.items():
            if array is not None and array.dtype.kind != "f":
                raise CheckpointError(
                    f"{keys.join(words.separator, layer, name)!r} must be floating-point: got "
                    f"{array.dtype}. Save the model again."
                )
        counter = leaves.get(words.counter, np.zeros((), np.int64))
        if counter.shape != () or counter.dtype.kind not in "iu" or counter < 0:
            raise CheckpointError(
                f"{keys.join(words.separator, layer, words.counter)!r} must be one number of "
                f"batches: got {counter!r}. Save the model again."
            )
        norms.append(layer)
    return norms


def set_counters(
    state: dict[str, Array], norms: list[str], words: Words, value: int, names: Names | None
) -> int:
    """Set each layer's counter in `state`, unless in `names`; returns the largest old counter."""
    import numpy as np

    largest = 0
    for layer in norms:
        counter = keys.join(words.separator, layer, words.counter)
        largest = max(largest, int(state.get(counter, 0)))
        if counter not in (names or {}):
            state[counter] = np.asarray(value, np.int64)
    return largest


def check_counts(counts: Counts | None) -> None:
    """Raise ValueError unless `counts` are pairs of counts."""
    for pair in counts.values() if isinstance(counts, Mapping) else [counts]:
        if pair is not None and not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(_is_count, pair))
        ):
            raise ValueError(
                "`avg_var_count` must be two counts of elements from 1, in the file and wanted: "
                f"got {pair!r}. Pass math.inf for the biased variance."
            )


def _is_count(n: object) -> bool:
    return isinstance(n, (int, float)) and not isinstance(n, bool) and n >= 1


def recount(
    state: dict[str, Array], norms: list[str], words: Words, counts: Counts | None
) -> list[str]:
    """Rescale the variances in `state`; returns notes."""
    per_layer = counts if isinstance(counts, Mapping) else dict.fromkeys(norms, counts)
    if unknown := per_layer.keys() - set(norms):
        raise CheckpointError(
            f"`avg_var_count` must name batch normalizations of the file, {norms}: got "
            f"{sorted(unknown)}."
        )
    notes = []
    for layer, pair in per_layer.items():
        if pair is None:
            continue
        factor = _bessel(pair[1]) / _bessel(pair[0])
        key = keys.join(words.separator, layer, words.var)
        state[key] = (state[key].astype("float64") * factor).astype(state[key].dtype)
        notes.append(f"{key!r} is multiplied by {factor:.6g}, from count {pair[0]} to {pair[1]}.")
    if same := len(norms) - len(notes):
        notes.append(
            f"{words.var} of {same} layer(s) is carried as it is. A file does not say by which "
            "count it is unbiased: the elements per channel of one rank (ChainerMN, chainer.links, "
            "nn.BatchNorm), of all ranks (multibn, nn.SyncBatchNorm), or none (NaiveSyncBatchNorm)."
            " Pass `avg_var_count` to change it."
        )
    return notes


def _bessel(count: float) -> float:
    return 1.0 if math.isinf(count) else count / max(count - 1, 1)
