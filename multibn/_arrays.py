"""What array_api_compat says of an array, but faster: a layer's step asks dozens of times."""

from typing import Any

import array_api_compat
import numpy as np

from multibn._typing import Array

_namespaces: dict[type, Any] = {}
_DLPACK_CPU = 1  # kDLCPU of the DLPack header


def array_namespace(x: Array, /) -> Any:
    """The namespace of `x` in the array API standard."""
    namespace = _namespaces.get(type(x))
    if namespace is None:
        namespace = _namespaces[type(x)] = array_api_compat.array_namespace(x)
    return namespace


def device(x: Array, /) -> Any:
    """Where `x` is; "cpu" for arrays of a NumPy before 2.0, which do not say."""
    return getattr(x, "device", "cpu")


def is_on_host(x: Array, /) -> bool:
    """Whether `x` is in host memory."""
    if isinstance(x, np.ndarray | np.generic):
        return True
    is_cpu = getattr(x, "is_cpu", None)  # torch's, which is faster than what follows
    return int(x.__dlpack_device__()[0]) == _DLPACK_CPU if is_cpu is None else bool(is_cpu)
