"""What a process holds: counted, and compared with what was held before."""

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from multibn.communicators.channel import Channel

MEMORY = 2.0  # MB by which a rank may grow: Python's tables double, once each
COLUMNS = ("MB", "descriptors", "threads", "groups", "store keys", "MPI communicators")


class Held(NamedTuple):
    """What this process holds, in the order of `COLUMNS`."""

    megabytes: float  # its own and shared memory, without the files that it has mapped
    descriptors: int
    threads: int
    groups: int  # with lines
    keys: int  # of multibn's, in the store of torch's default process group; see `_is_notice`
    communicators: int  # of MPI, MPI's own included

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        return cls(
            _megabytes(),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sum(type(obj) is Channel for obj in gc.get_objects()),
            sum("multibn/" in key and not _is_notice(key) for key in _keys()),
            communicators(),
        )

    def growth(self, before: "Held") -> str:
        """What has grown since, or ""."""
        allowed = (MEMORY, *[0] * (len(self) - 1))
        grown = [
            f"{name} {b:.4g} -> {a:.4g}"
            for name, b, a, more in zip(COLUMNS, before, self, allowed, strict=True)
            if a > b + more
        ]
        return ", ".join(grown)


def communicators() -> int:
    """How many communicators MPI has."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is None or not loaded.Is_initialized():
        return 0
    # Open MPI gives a new communicator the lowest number that no other has.
    trial = loaded.COMM_SELF.Dup()
    number = int(trial.py2f())
    trial.Free()
    return number


def _megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return sum(int(kb) for kb in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status)) / 1e3


def _keys() -> list[str]:
    return list(base_store().list_keys()) if dist.is_initialized() else []


def _is_notice(key: str) -> bool:
    """Whether ranks that have waited long have left this key: one of each, and their count."""
    group = key.partition("multibn/")[2].partition("/")[0]
    living: Any = dist.distributed_c10d._world.pg_names.values()
    return "/notice" in key and group in living


def base_store() -> Any:
    """The store of torch's default process group, without the parts that torch makes of it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
