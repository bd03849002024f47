"""The batch normalization layers in a model's state: names and contents of their arrays."""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from multibn._typing import Array
from multibn.checkpoint import keys
from multibn.checkpoint.files import SEPARATORS, CheckpointError

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
    """A framework's name, and its names of the arrays of a batch normalization."""

    framework: str
    mean: str
    var: str
    counter: str
    scale: str
    shift: str

    def key(self, layer: str, name: str) -> str:
        """The key of a layer's array."""
        return keys.join(SEPARATORS[self.framework], layer, name)


CHAINER = Words("chainer", "avg_mean", "avg_var", "N", "gamma", "beta")
TORCH = Words("torch", "running_mean", "running_var", "num_batches_tracked", "weight", "bias")


def checked_layers(state: Mapping[str, Array], words: Words) -> list[str]:
    """Names of the layers with running statistics. Raises if a layer's arrays are not valid."""
    norms = []
    for layer, leaves in keys.layers(state, SEPARATORS[words.framework]).items():
        if not {words.mean, words.var} & leaves.keys():
            continue
        arrays = {name: leaves[name] for name in words[1:] if name in leaves}
        said = ", ".join(f"{k} {a.dtype} {a.shape or a}" for k, a in arrays.items())
        counter = arrays.pop(words.counter, None)
        if (
            not {words.mean, words.var} <= arrays.keys()
            or len({a.shape for a in arrays.values()}) > 1
            or any(a.ndim != 1 or a.dtype.kind != "f" for a in arrays.values())
            or (counter is not None and not _is_number_of_batches(counter))
        ):
            raise CheckpointError(
                f"the batch normalization {layer!r} must have {words.mean} and {words.var}, all of "
                f"its arrays floating-point of one shape (C,), and one integer {words.counter}, if "
                f"any, of 0 or more: got {said}. Save the model again, or leave the layer out with "
                "`names`."
            )
        norms.append(layer)
    return norms


def _is_number_of_batches(counter: Array) -> bool:
    return counter.ndim == 0 and counter.dtype.kind in "iu" and bool(counter >= 0)


def check_counts(counts: Counts | None) -> None:
    """Raise ValueError unless `counts` are pairs of counts."""
    for pair in counts.values() if isinstance(counts, Mapping) else [counts]:
        if pair is not None and not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and all(isinstance(n, int | float) and n is not True and n >= 1 for n in pair)
        ):
            raise ValueError(
                "`avg_var_count` must be two counts of elements, each 1 or more: the one by which "
                f"the file is unbiased, and the one wanted: got {pair!r}. Pass math.inf for the "
                "biased variance."
            )


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
        key = words.key(layer, words.var)
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
