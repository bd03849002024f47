"""What every communicator promises, checked in one function for all of them."""

import atexit
import copy
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from multibn.communicators import Communicator, as_communicator
from multibn.communicators.exit import watched_channels
from multibn.communicators.polling import poll
from tests.helpers import require

SHAPES = [(), (1,), (7,), (2, 3), (0,)]


def check_communicator(comm: Communicator) -> None:
    """Check `comm`. Collective: every rank calls it, with the same arrays available."""
    problems = [*_allreduce(comm), *_split(comm), *_handle(comm)]
    assert not problems, problems


def check_deadline(comm: Any, everybody: Communicator) -> None:
    """Check that `comm`, which is not used again, has a deadline.

    Collective over `everybody`, the same ranks, 2 or more. The last rank comes when all others have
    given up.
    """
    late = comm.rank == comm.size - 1
    said = ""
    comm.allreduce(np.zeros(1))
    comm.channel.watchdog.timeout = 0.8
    if late:
        notices = comm.channel.transport.board.read
        others = comm.size - 1
        assert poll(lambda: [n.state for n in notices().values()] == ["failed"] * others, 60.0)
    start = time.monotonic()
    try:
        comm.allreduce(np.zeros(1))
    except (TimeoutError, RuntimeError) as error:  # RuntimeError: of a rank that has given up
        said = str(error)
    seconds = time.monotonic() - start
    watched_channels.discard(comm.channel)  # the end of the program need not mention this failure
    everybody.allreduce(np.zeros(1))
    if late:
        return
    # One rank gives up first; the others may read that in its notice.
    assert re.search(r"rank \d has waited 0\.8 s in a sum of float64 numbers of shape \(1,\)", said)
    assert f"for rank(s) [{comm.size - 1}]: rank {comm.size - 1} (machine " in said
    assert 0.7 < seconds < 30.0


def check_interruption(comm: Any, everybody: Communicator) -> None:
    """Check that an exception in a wait of rank 0 makes `comm`, not used again, fail on all ranks.

    Collective over `everybody`, the same ranks, 2 or more.
    """

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt("by a signal")  # as Ctrl-C in a notebook

    comm.allreduce(np.zeros(1))
    said = []
    if comm.rank == 0:
        earlier = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:  # they come when rank 0 has given up, however busy the machine is
        notices = comm.channel.transport.board.read
        assert poll(lambda: getattr(notices().get(0), "state", "") == "failed", 60.0)
    for _ in range(3):
        try:
            comm.allreduce(np.zeros(1))
        except (KeyboardInterrupt, RuntimeError) as error:
            said.append(str(error))
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, earlier)
    watched_channels.discard(comm.channel)
    everybody.allreduce(np.zeros(1))
    # The message that was under way may still come to the other ranks.
    assert len(said) >= 2
    assert "rank 0 was interrupted in a sum of float64 numbers of shape (1,) by Keybo" in said[-1]
    assert "Restart all ranks. Without a restart, in a notebook for example: with" in said[-1]
    if comm.rank == 0:
        assert said[0] == "by a signal"


def check_fork(comm: Any, *, used: bool) -> None:
    """Check that a forked child of rank 0 does nothing in its parent's name. Collective."""
    if used:
        comm.allreduce(np.zeros(1))
    if comm.rank == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                comm.allreduce(np.zeros(1))
            except BaseException as error:
                os.write(writer, str(error).encode())
            atexit._run_exitfuncs()  # as at the end of a program
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reader, 10_000).decode()
    assert comm.allreduce(np.ones(1)).item() == comm.size
    if comm.rank == 0:
        assert f"this process (pid {child}) is a fork of rank 0 (pid {os.getpid()}), and a" in said
        assert "process_group=multibn.SingleProcess(), or start the child by spawn." in said


def _arrays(rank: int) -> Iterator[tuple[str, Any]]:
    for dtype in ("float16", "float32", "float64", "int64"):
        for shape in SHAPES:
            size = int(np.prod(shape))
            yield f"numpy {dtype} {shape}", np.asarray(np.arange(size).reshape(shape) + rank, dtype)
    strided = np.arange(12.0).reshape(3, 4)[:, ::2] + rank
    strided.flags.writeable = False
    yield "numpy strided and read-only", strided
    if not require.available("torch"):
        return
    import torch

    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        for shape in SHAPES:
            size = int(np.prod(shape))
            yield f"{kind} {shape}", (torch.arange(size).reshape(shape) + rank).to(kind)
    yield "torch transposed", torch.arange(12.0).reshape(3, 4).T + rank
    yield "torch requires_grad", (torch.arange(3.0) + rank).requires_grad_()


def _numpy(x: Any) -> Any:
    return np.asarray(x.detach().double() if hasattr(x, "detach") else x, dtype=np.float64)


def _allreduce(comm: Communicator) -> Iterator[str]:
    mine = list(_arrays(comm.rank))
    expected = [
        np.sum([_numpy(x) for _, x in of_all], axis=0)
        for of_all in zip(*[_arrays(rank) for rank in range(comm.size)], strict=True)
    ]
    before = [_numpy(x).copy() for _, x in mine]
    sums = [comm.allreduce(x) for _, x in mine]
    for (name, x), old, want, got in zip(mine, before, expected, sums, strict=True):
        if type(got) is not type(x) or got.dtype != x.dtype or got.shape != x.shape:
            yield f"{name}: returned {type(got)} {got.dtype} {got.shape}"
        elif not np.array_equal(_numpy(got), want):
            yield f"{name}: {got} instead of {want}"
        if not np.array_equal(_numpy(x), old):
            yield f"{name}: the argument was changed"
        if got is x:
            yield f"{name}: returned its argument"


def _split(comm: Communicator) -> Iterator[str]:
    """Groups of even and odd ranks, in reversed order; then each rank alone."""
    group = comm.split(comm.rank % 2, key=-comm.rank)
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    total = group.allreduce(np.array([float(comm.rank)]))
    alone = comm.split(comm.rank)
    unchanged = alone.allreduce(np.array([3.0]))
    if (group.size, group.rank) != (len(members), members.index(comm.rank)):
        yield f"split: rank {group.rank} of {group.size}, members {members}"
    if total[0] != sum(members):
        yield f"split: sum {total} over {members}"
    if (alone.size, alone.rank, unchanged[0]) != (1, 0, 3.0):
        yield f"split into one: rank {alone.rank} of {alone.size}, sum {unchanged}"


def _handle(comm: Communicator) -> Iterator[str]:
    group = comm.split(comm.rank % 2)
    for name, handle in (("world", comm), ("group", group)):
        if as_communicator(handle) is not handle:
            yield f"{name}: as_communicator made another one of it"
        for copied in (copy.copy(handle), copy.deepcopy(handle), copy.deepcopy([handle])[0]):
            if copied is not handle:
                yield f"{name}: a copy is another handle"
        found = pickle.loads(pickle.dumps(handle))
        total = found.allreduce(np.array([1.0]))
        if (found.rank, found.size, total[0]) != (handle.rank, handle.size, handle.size):
            yield f"{name}: a pickle found rank {found.rank} of {found.size}, sum {total}"
