"""Frameworks and launchers that tests need: skipped without them, failed if they were required."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from multibn._platform import find_command, importable

# What pytest.importorskip may find missing. Required, it is missed before the first test.
DEV = (
    "array_api_strict",
    "fvcore",
    "matplotlib",
    "omegaconf",
    "safetensors",
    "tqdm",
    "yacs.config",
)

# Where `make test` installs tests/originals/requirements.txt.
ORIGINALS = Path(sys.prefix, "originals")


def _gpu(module: str) -> bool:
    """Whether `module`, torch or cupy, finds a GPU."""
    return importable(module) and bool(import_module(module).cuda.is_available())


@cache
def _namespaces() -> bool:
    """Whether this process may make network namespaces, and devices in them."""
    tools = ("ip", "unshare", "setpriv", "hostname")
    if not all(shutil.which(tool) for tool in tools) or os.geteuid() != 0:
        return False
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return False
    name = f"mbtrial{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if added.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return added.returncode == 0


PROBES: dict[str, Callable[[], bool]] = {
    "torch": lambda: importable("torch"),
    "chainer": lambda: importable("chainer"),
    "flax": lambda: importable("flax") and importable("jax"),
    "core": lambda: importable("multibn.kernels.core._core"),
    "triton": lambda: importable("triton.knobs"),  # of 3.4
    "gpu": lambda: _gpu("torch"),
    "cupy": lambda: _gpu("cupy"),
    "a machine without CuPy": lambda: not importable("cupy"),
    "torchrun": lambda: importable("torch.distributed.run"),
    "mmengine": lambda: importable("mmengine"),
    "mmpretrain": lambda: Path(ORIGINALS, "mmpretrain").is_dir(),
    "lightning": lambda: importable("lightning"),
    "dev": lambda: all(map(importable, DEV)),
    "cli": lambda: importable("rich"),
    "gymnasium": lambda: importable("gymnasium"),
    "mpiexec": lambda: find_command("mpiexec") is not None and importable("mpi4py"),
    "netns": _namespaces,
    "programs": lambda: importable("torchinfo"),  # which no other group has
    "ray": lambda: Path(".venv/ray/installed").exists(),
    "mpich": lambda: Path(".venv/mpich/installed").exists(),
    "ipyparallel": lambda: Path(".venv/ipyparallel/installed").exists(),
    # Its tests take minutes: only `make clusters` asks for them.
    "slurm": lambda: "slurm" in _required and os.geteuid() == 0 and bool(shutil.which("slurmctld")),
}


@contextmanager
def without_core() -> Iterator[None]:
    """A context in which this process has no C core, of which the first layer warns."""
    from multibn import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "multibn.kernels.core._core", None)
        patch.delattr("multibn.kernels.core._core", raising=False)
        patch.delitem(sys.modules, "multibn.kernels.cpu", raising=False)
        patch.delenv("MULTIBN_KERNELS", raising=False)
        kernels._native.cache_clear()
        yield
    kernels._native.cache_clear()


def check_a_missing_core_on_rank_0(rank: int, call: Callable[[], object]) -> None:
    """Where warnings are errors, the one of rank 0 alone is an error on all ranks."""
    if rank > 0:
        with pytest.raises(RuntimeError, match=r"stops in .*rejected on rank\(s\) \[0\]"):
            call()
        return
    with without_core(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="the C core is missing"):
            call()


_required: set[str] = set()


def set_required(names: Iterable[str]) -> None:
    names = set(names)
    for name in names - PROBES.keys():
        raise pytest.UsageError(f"--require knows {', '.join(PROBES)}: got {name!r}")
    if "dev" in names and not available("dev"):
        missing = [module for module in DEV if not importable(module)]
        raise pytest.UsageError(f"--require dev: {', '.join(missing)} cannot be imported")
    _required.clear()
    _required.update(names)


def available(*names: str) -> bool:
    """Whether all of `names` are here."""
    return all(PROBES[name]() for name in names)


def need(*names: str) -> None:
    """Skip the test, or at import the whole module, unless `names` are here."""
    for name in names:
        if available(name):
            continue
        if name in _required:
            pytest.fail(f"{name} is required and not available", pytrace=False)
        pytest.skip(f"{name} is not available", allow_module_level=True)
