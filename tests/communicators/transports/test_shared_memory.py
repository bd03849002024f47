"""Channel through shared memory, between threads: each opens the memory as a process would."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn.communicators.channel import HostArray, spin_seconds
from multibn.communicators.polling import Poll, chain
from multibn.communicators.transports import shared_memory
from multibn.communicators.transports.shared_memory import SharedMemory
from multibn.communicators.watchdog import RankLostError
from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks

require.need("torch")

import torch.distributed as dist  # noqa: E402

if shared_memory.why_not() is not None:
    pytest.skip(str(shared_memory.why_not()), allow_module_level=True)


def _open(machine: SharedMemory, number: int, buffer: HostArray | None = None) -> Any:
    opened: list[Any] = []
    assert chain(machine.open_allreduce(number, buffer), opened.append)(10.0)
    return opened[0]


def _on_ranks(size: int, function: Callable[[SharedMemory], Any]) -> list[Any]:
    """What the function returns on each rank."""
    store = dist.HashStore()

    def run(world: ThreadCommunicator) -> Any:
        _here.rank = world.rank
        machine = SharedMemory(store, world.rank, size)
        result = function(machine)
        world._exchange(None)
        return result

    return run_ranks(size, run)


_here = threading.local()


def _message(rank: int, kind: str, shape: tuple[int, ...]) -> HostArray:
    rng = np.random.default_rng([rank, *shape])
    return np.asarray(100 * rng.standard_normal(shape)).astype(kind)


KINDS = ("float64", "float32", "int64", "int16", "uint8", "complex128")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 5), (516,), (517,))


def _is_done(pending: Poll | None, seconds: float) -> bool:
    return pending is None or pending(seconds)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_a_sum_in_the_order_of_the_ranks(size: int) -> None:
    def sums(machine: SharedMemory) -> list[HostArray]:
        everything, buffer = _open(machine, 0), np.zeros(516)
        widths = _open(machine, 516, buffer)
        results = []
        for i in range(4):  # each half of the slots twice
            if i == machine.rank:
                time.sleep(0.01)
            buffer[:] = _message(machine.rank, "float64", (516,))
            assert _is_done(widths.begin(buffer), 10.0)
            results.append(buffer.copy())
        for kind in KINDS:
            for shape in SHAPES:
                a = _message(machine.rank, kind, shape)
                assert _is_done(everything.begin(a), 10.0)
                results.append(a)
        return results

    cases = [("float64", (516,))] * 4 + [(kind, shape) for kind in KINDS for shape in SHAPES]
    for (kind, shape), results in zip(cases, zip(*_on_ranks(size, sums), strict=True), strict=True):
        first, *others = (_message(rank, kind, shape) for rank in range(size))
        for result in results:
            assert result.dtype == kind
            np.testing.assert_array_equal(result, sum(others, start=first))


def test_memory_goes_when_nobody_has_the_lines() -> None:
    """And meanwhile it has no name, and belongs to this user alone."""
    store = dist.HashStore()
    gc.collect()  # what earlier tests have left
    before = _descriptors(), _maps()

    def use(world: ThreadCommunicator) -> tuple[int, int] | None:
        machine = SharedMemory(store, world.rank, 2)
        lines = [_open(machine, number, np.zeros(max(number, 8))) for number in range(100)]
        world._exchange(None)
        counted = (_descriptors(), _maps()) if world.rank == 0 else None
        world._exchange(None)
        del machine, lines
        return counted

    # Of 100 lines of two ranks.
    assert run_ranks(2, use)[0] == (before[0] + 2, before[1] + 2)
    assert (_descriptors(), _maps()) == before
    with shared_memory._offered(2**16) as (offer, _):
        assert os.stat(offer["fd"]).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(offer["fd"])


def _descriptors() -> int:
    """Of such memory; other threads, which launch ranks meanwhile, open and close descriptors."""
    opened = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened += "memfd:multibn-" in os.readlink(descriptor)
    return opened


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:multibn-")


def test_memory_of_another_process_is_not_taken_for_a_ranks() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with shared_memory._offered(2**16) as (offer, _):
        assert shared_memory._opened(offer) is not None
        for other in (
            *({"name": "multibn-0"}, {"pid": ended.pid}, {"pid": 1}, {"fd": 10_000}),
            {"nbytes": 2**17},
        ):
            assert shared_memory._opened(offer | other) is None
        for name in ("pid", "fd"):  # whoever can write to the store chooses no path
            with pytest.raises(ValueError, match="invalid literal for int"):
                shared_memory._opened(offer | {name: "self/../1"})
        with pytest.raises(PermissionError):  # sealed: those who read beyond an end would end
            os.ftruncate(offer["fd"], 2**12)
    assert shared_memory._opened(offer) is None
    assert shared_memory._opened({"pid": os.getpid()}) is None


@pytest.mark.parametrize("reason", ["the first has none", "another has none", "lines are too long"])
def test_no_line_is_opened_where_memory_cannot_be_shared(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "lines are too long":
        monkeypatch.setattr(shared_memory, "_NUMBERS", 1000)
    else:
        without = int(reason == "another has none")
        monkeypatch.setattr(
            shared_memory, "why_not", lambda: "none" if _here.rank == without else None
        )
    assert _on_ranks(2, lambda machine: _open(machine, 2000, np.ones(2000))) == [None, None]


def test_ranks_that_open_different_lines_do_not_meet() -> None:
    def opened(machine: SharedMemory) -> bool:
        done = chain(machine.open_allreduce(8 + machine.rank, np.zeros(16)))
        return done(1.0) or done(0.1)

    assert _on_ranks(2, opened) == [False, False]


def test_unlike_arrays_are_not_added() -> None:
    arrays: list[list[Any]] = [
        [np.ones(3), np.ones(4)],
        [np.ones(4), np.ones(4, np.float32)],
    ]

    def sums(machine: SharedMemory) -> list[bool]:
        results = []
        for number, unlike in enumerate(arrays):
            done = _open(machine, number).begin(unlike[machine.rank])
            results += [done(0.5), done(0.01)]
        return results

    assert _on_ranks(2, sums) == [[False] * 4] * 2


def test_a_process_that_ended_is_noticed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def lose(machine: SharedMemory) -> str:
        line, a = _open(machine, 8, np.zeros(8)), np.zeros(8)
        machine._pids[1] = ended.pid
        if machine.rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
            line.begin(a)(10.0)
        return "noticed"

    assert _on_ranks(2, lose) == ["noticed", ""]


def test_a_process_that_ends_while_the_ranks_meet_is_noticed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for space, opened, noticed in (
        (shared_memory.pid_space(), True, True),
        ("other", False, False),
    ):
        store = dist.HashStore()
        store.set("rank 1", json.dumps([opened, space, ended.pid]))
        store.add("number of ranks", 1)
        machine = SharedMemory(store, 0, 2)
        if noticed:
            with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
                _open(machine, 0)
        else:  # on another machine, the number says nothing
            assert _open(machine, 0) is None


def test_a_rank_that_leaves_is_noticed_when_its_last_message_is_read() -> None:
    def leave(machine: SharedMemory) -> list[float]:
        line = _open(machine, 0)
        a, b = np.ones((2, 1))
        done = line.begin(a)
        if machine.rank == 1:
            assert done(10.0)
            machine.close(goodbye=True)
            return [float(a[0])]
        time.sleep(0.1)
        assert done(10.0)
        with pytest.raises(RankLostError, match="rank 1 has left"):
            line.begin(b)(10.0)
        return [float(a[0])]

    assert _on_ranks(2, leave) == [[2.0], [2.0]]


@pytest.fixture
def gate() -> HostArray:
    return np.zeros(64, np.uint32)


def test_a_gate_counts_beyond_its_32_bits(gate: HostArray) -> None:
    core, at, a = shared_memory.core, gate.ctypes.data, np.zeros(1)
    gate[0] = 2**32 - 2
    goal = 2**32 + 1
    for _ in range(3):
        assert not core.wait(at, goal, 0.0, 0.0)
        core.arrive(at, goal, a.ctypes.data, a.ctypes.data, 8)
    assert gate[0] == 1
    assert core.wait(at, goal, 0.0, 0.0)
    assert not core.wait(at, goal + 1, 0.0, 0.0)


@pytest.mark.parametrize("yielding", [0.0, 10.0])
def test_a_wait_gives_way_to_threads_and_signals(gate: HostArray, yielding: float) -> None:
    core, at, a = shared_memory.core, gate.ctypes.data, np.zeros(1)
    start, used = time.monotonic(), time.thread_time()
    assert not core.wait(at, 1, 0.1, yielding)
    assert 0.1 <= time.monotonic() - start < 5.0
    assert yielding or time.thread_time() - used < 0.01, "a rank that naps takes no core"
    later = threading.Timer(0.05, core.arrive, (at, 1, a.ctypes.data, a.ctypes.data, 8))
    later.start()
    assert core.wait(at, 1, 10.0, yielding)
    later.join()
    assert gate[32] == 0  # nobody sleeps

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("by a signal")

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    start = time.monotonic()
    with pytest.raises(InterruptedError, match="by a signal"):
        core.wait(at, 2, 10.0, yielding)
    assert time.monotonic() - start < 5.0
    signal.signal(signal.SIGALRM, earlier)


def test_the_last_to_arrive_wakes_those_who_sleep(gate: HostArray) -> None:
    """Long before their naps of 50 ms end."""
    core, at, a = shared_memory.core, gate.ctypes.data, np.zeros(1)
    late: list[float] = []

    def arrive(goal: int) -> None:
        late.append(-time.monotonic())
        core.arrive(at, goal, a.ctypes.data, a.ctypes.data, 8)

    for goal in range(1, 6):
        threading.Timer(0.01, arrive, (goal,)).start()
        assert core.wait(at, goal, 10.0, 0.0)
        late[-1] += time.monotonic()
    assert np.median(late) < 0.02, late


@pytest.mark.parametrize("can_tell", [True, False])
def test_cores_are_offered_for_long_where_there_are_enough(
    can_tell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the process, or of the machine where the system does not tell."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if not can_tell:
        monkeypatch.delattr(os, "sched_getaffinity")
    cores = 3 if can_tell else 4
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    assert spin_seconds(cores) == 0.1
    assert spin_seconds(cores + 1) == 2e-4
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "5")
    assert spin_seconds() == 2e-4


def test_arguments_of_the_extension_are_checked(gate: HostArray) -> None:
    with pytest.raises(TypeError, match="1 arguments instead of 4"):
        shared_memory.core.wait(0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        shared_memory.core.wait(gate.ctypes.data, 1, "soon", 0.0)  # type: ignore[arg-type]


def test_why_not_says_what_keeps_memory_from_being_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setenv("MULTIBN_SHARED_MEMORY", "0")
    assert shared_memory.why_not() == "MULTIBN_SHARED_MEMORY is 0"
    monkeypatch.setenv("MULTIBN_SHARED_MEMORY", "no")
    with pytest.raises(ValueError, match="MULTIBN_SHARED_MEMORY must be 0 or 1: got 'no'"):
        shared_memory.why_not()
    monkeypatch.setenv("MULTIBN_SHARED_MEMORY", "1")
    for where, name, instead, said in (
        (shared_memory, "_opened", lambda offer: None, "needs /proc: cannot open /proc/"),
        (os, "posix_fallocate", refuse, "gives no memory to share: Cannot allocate"),
        (shared_memory, "core", None, "multibn was built without a C compiler: install one"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, instead)
            assert said in str(shared_memory.why_not())
    monkeypatch.delattr(os, "memfd_create")
    assert shared_memory.why_not() == "needs Linux"
