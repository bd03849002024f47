"""Conversion between the variables of a flax model and a flat state, and between kernel layouts.

torch has one state dict; flax has two collections: `params`, and `batch_stats` for the running
statistics of batch norm.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multibn._typing import Array

SEPARATOR = "."
PARAMS, BATCH_STATS = "params", "batch_stats"
# Last parts of the names in `batch_stats`; all other arrays are parameters.
_STATISTICS = "mean", "var"


def with_collections(state: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix each name of a flat state with the array's collection."""
    return {
        f"{BATCH_STATS if key.rpartition(SEPARATOR)[2] in _STATISTICS else PARAMS}.{key}": value
        for key, value in state.items()
    }


def read(path: Path) -> dict[str, Any]:
    """Return the arrays in a file of flax.serialization, by their dotted names."""
    from flax import serialization
    from flax.traverse_util import flatten_dict

    tree = serialization.msgpack_restore(path.read_bytes())
    return dict(flatten_dict(tree, sep=SEPARATOR))


def serialize(state: Mapping[str, Any]) -> bytes:
    """Return the bytes of a flax.serialization file with both collections."""
    from flax import serialization
    from flax.traverse_util import unflatten_dict

    return bytes(
        serialization.msgpack_serialize(unflatten_dict(with_collections(state), SEPARATOR))
    )


def kernel(weight: Array, *, transposed: bool) -> Array:
    """Return torch's weight in flax's layout.

    `(out, in)` becomes `(in, out)`, and `(out, in, *spatial)` becomes `(*spatial, in, out)`. The
    weight of a transposed convolution, `(in, out, *spatial)`, becomes `(*spatial, in, out)` with
    flipped spatial axes: torch computes the gradient of a convolution, flax convolves a dilated
    input.
    """
    import numpy as np

    spatial = tuple(range(2, weight.ndim))
    if transposed:
        return np.flip(weight, spatial).transpose(*spatial, 0, 1)
    return weight.transpose(*spatial, 1, 0)


def weight(kernel: Array, *, transposed: bool) -> Array:
    """Return flax's kernel in torch's layout; the inverse of `kernel`."""
    import numpy as np

    spatial = tuple(range(kernel.ndim - 2))
    if transposed:
        return np.flip(kernel, spatial).transpose(-2, -1, *spatial)
    return kernel.transpose(-1, -2, *spatial)
