"""A flax model's variables as one flat state, and the layouts of its kernels.

flax keeps what torch has in one state dict in two collections: `params`, and `batch_stats` with
batch norm's running statistics.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multibn._typing import Array

SEPARATOR = "."
PARAMS, BATCH_STATS = "params", "batch_stats"
# Leaves of `batch_stats`; all others are parameters.
_STATISTICS = "mean", "var"


def leaves(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of nested dicts with their dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{name}{SEPARATOR}")
        else:
            yield f"{path}{name}", value


def with_collections(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state whose names begin with the collection of each array."""
    return {
        f"{BATCH_STATS if key.rpartition(SEPARATOR)[2] in _STATISTICS else PARAMS}.{key}": value
        for key, value in state.items()
    }


def read(path: Path) -> Any:
    """Return what flax.serialization has written: nested dicts of arrays."""
    from flax import serialization

    return serialization.msgpack_restore(path.read_bytes())


def written(state: Mapping[str, Any]) -> bytes:
    """Return the content of a file that flax.serialization reads: both collections."""
    from flax import serialization
    from flax.traverse_util import unflatten_dict

    return bytes(
        serialization.msgpack_serialize(unflatten_dict(with_collections(state), SEPARATOR))
    )


def kernel(weight: Array, *, transposed: bool) -> Array:
    """Return torch's weight in flax's layout.

    `(out, in)` becomes `(in, out)`, `(out, in, *spatial)` `(*spatial, in, out)`. A transposed
    convolution's `(in, out, *spatial)` becomes `(*spatial, in, out)`, mirrored in space: torch's
    layer is the gradient of a convolution, flax's convolves a dilated input.
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
