"""The side group over gloo, with ranks as threads."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from multibn import wire
from multibn.communicators.polling import chain
from multibn.communicators.transports import gloo, mpi
from multibn.communicators.transports.gloo import PrivateGloo, allreduce_any_dtype
from multibn.communicators.transports.shared_memory import SLOT_NUMBERS
from tests.helpers import launch
from tests.helpers.ranks import ThreadCommunicator, run_ranks

NEEDS = "torch"

SECONDS = 60.0


def _on_ranks(size: int, work: Callable[[PrivateGloo, int], Any]) -> list[Any]:
    """What `work(side, rank)` returns on each rank."""
    store = dist.HashStore()

    def run(world: ThreadCommunicator) -> Any:
        side = PrivateGloo(store, world.rank, size)
        assert chain(side.connect())(SECONDS)
        result = work(side, world.rank)
        world._exchange(None)
        side.close(failed=False)
        return result

    return run_ranks(size, run)


def test_the_decision_names_the_block_of_each_transport() -> None:
    text = " ".join((launch.ROOT / "docs/decisions/0008-checked-messages.md").read_text().split())
    blocks = [wire.length(n) for n in (128, 256)]
    assert blocks == [mpi._BLOCK_NUMBERS, gloo.BLOCK_NUMBERS]
    assert (
        f"holds {SLOT_NUMBERS:,} numbers in shared memory, {blocks[0]} (a layer of 128 channels) "
        f"over MPI, and {blocks[1]} (256 channels) over gloo." in text
    )


@pytest.mark.parametrize("dtype", ["float64", "float16", "int16", "uint16", "bool", "complex64"])
def test_vectors_of_any_dtype_are_summed(dtype: str) -> None:
    def work(side: PrivateGloo, rank: int) -> list[Any]:
        a = np.array([0, 1, rank]).astype(dtype)
        assert chain(allreduce_any_dtype(a, side.start))(SECONDS)
        assert a.dtype == dtype
        return a.tolist()

    expected = [0, 1, 1] if dtype == "bool" else [0, 2, 1]
    assert _on_ranks(2, work) == [expected] * 2


def test_a_wait_has_a_deadline_and_can_be_repeated() -> None:
    came = threading.Event()

    def work(side: PrivateGloo, rank: int) -> float:
        a = np.ones(600)
        if rank == 1:
            came.wait(SECONDS)
        done = side.start(a)
        if rank == 0:
            start = time.monotonic()
            assert not done(0.0)
            assert not done(0.12)
            assert 0.1 < time.monotonic() - start < 10.0
            came.set()
        assert done(SECONDS)
        return float(a.sum())

    assert _on_ranks(2, work) == [1200.0, 1200.0]


@pytest.mark.parametrize("failed", [False, True])
def test_after_a_failure_alone_the_group_is_kept_for_ever(failed: bool) -> None:
    """Gloo would wait for the message under way, and the process could not end."""
    references = []

    def work(side: PrivateGloo, rank: int) -> None:
        done = side.start(np.ones(1))
        assert done(SECONDS)
        group = side._group
        before = sys.getrefcount(group)
        side.close(failed=failed)
        assert side._group is None
        references.append(sys.getrefcount(group) - before)

    _on_ranks(2, work)
    assert references == [failed - 1] * 2  # that of `side` is gone


def test_numbers_that_gloo_does_not_sum_are_refused() -> None:
    def work(side: PrivateGloo, rank: int) -> None:
        with pytest.raises(TypeError, match=r"Cannot cast array data from dtype..float128"):
            chain(allreduce_any_dtype(np.array([0.5], np.longdouble), side.start))

    _on_ranks(2, work)


# As where no core is free for gloo's thread until the interpreter ends.
_PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from multibn.torch import SyncBatchNorm

class Last:
    def __del__(self):
        time.sleep(0.1)  # other threads run while the interpreter ends

last = Last()
dist.init_process_group("gloo")
SyncBatchNorm(2)(torch.ones(2, 2))
sys.setswitchinterval(10)
time.sleep(dist.get_rank())
dist.all_reduce(torch.ones(1), async_op=True)
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
"""


@pytest.mark.launches
def test_a_process_is_not_aborted_where_gloo_has_a_tensor_to_release(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    ran = launch.run("torchrun", 2, str(tmp_path / "program.py"), real=True)
    assert ran.returncode == 0, ran.stdout


_DESTROYED = """
import os
import torch, torch.distributed as dist
{first}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
{last}
dist.destroy_process_group()
names = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
print(any("gloo" in name for name in names))
"""


@pytest.mark.parametrize(
    "first, last, alive",
    [
        ("import torch.distributed.nn", "del model", False),
        ("import torch.distributed.nn", "", True),
        ("", "del model", True),
    ],
)
def test_the_page_says_what_ends_the_threads_of_gloo(first: str, last: str, alive: bool) -> None:
    """The program does not use multibn."""
    script = _DESTROYED.format(first=first, last=last)
    python = launch.python() if first else sys.executable  # a fork has imported all of torch
    said = launch.printed("-c", script, interpreter=python, alone=True)
    assert said == f"{alive}\n"
    page = (launch.ROOT / "docs/guides/when-it-fails.md").read_text()
    assert f"`{first or last}`" in page


def test_a_connection_that_fails_is_an_error() -> None:
    side = PrivateGloo(dist.HashStore(), 2, 2)  # a rank that cannot be
    with pytest.raises(RuntimeError, match="no connection over gloo: "):
        chain(side.connect())(SECONDS)
