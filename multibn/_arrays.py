"""What array_api_compat says of an array, but faster: a layer's step asks dozens of times."""

from typing import Any

import array_api_compat

from multibn._typing import Array

_namespaces: dict[type, Any] = {}


def array_namespace(x: Array, /) -> Any:
    """The namespace of `x` in the array API standard."""
    found = _namespaces.get(type(x))
    if found is None:
        found = _namespaces[type(x)] = array_api_compat.array_namespace(x)
    return found


def device(x: Array, /) -> Any:
    """Where `x` is; "cpu" for arrays of a NumPy before 2.0, which do not say."""
    return getattr(x, "device", "cpu")
