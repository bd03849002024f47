"""Sums in shared memory, between threads: each opens the memory as a process would."""

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from multibn import _platform
from multibn._typing import HostArray
from multibn.communicators.polling import Poll, chain, spin_seconds
from multibn.communicators.transports import shared_memory
from multibn.communicators.transports.shared_memory import (
    SLOT_NUMBERS,
    SharedMemory,
    create_shared_memory,
)
from multibn.communicators.watchdog import RankLostError
from tests.helpers.ranks import ThreadCommunicator, run_ranks

NEEDS = "torch"

if shared_memory.unavailable_reason() is not None:
    pytest.skip(str(shared_memory.unavailable_reason()), allow_module_level=True)


def _begun(machine: SharedMemory, a: HostArray) -> Poll:
    begin = machine.prepare(a)
    assert begin is not None
    return begin() or (lambda seconds: True)


def _met(store: Any, rank: int, size: int) -> Any:
    """The memory that the ranks share, or None."""
    found: list[Any] = []

    def steps() -> Iterator[Poll]:
        found.append((yield from create_shared_memory(store, rank, size)))

    assert chain(steps())(10.0)
    return found[0]


def _on_ranks(size: int, function: Callable[[SharedMemory], Any]) -> list[Any]:
    """What the function returns on each rank."""
    store = dist.HashStore()

    def run(world: ThreadCommunicator) -> Any:
        _here.rank = world.rank
        machine = _met(store, world.rank, size)
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


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_a_sum_in_the_order_of_the_ranks(size: int) -> None:
    def sums(machine: SharedMemory) -> list[HostArray]:
        memory = np.zeros(516)
        begin, results = machine.prepare(memory), []
        assert begin is not None
        for i in range(4):  # each half of the slots twice
            if i == machine.rank:
                time.sleep(0.01)
            memory[:] = _message(machine.rank, "float64", (516,))
            pending = begin()
            assert pending is None or pending(10.0)
            results.append(memory.copy())
        for kind in KINDS:
            for shape in SHAPES:
                a = _message(machine.rank, kind, shape)
                assert _begun(machine, a)(10.0)
                results.append(a)
        return results

    cases = [("float64", (516,))] * 4 + [(kind, shape) for kind in KINDS for shape in SHAPES]
    for (kind, shape), results in zip(cases, zip(*_on_ranks(size, sums), strict=True), strict=True):
        first, *others = (_message(rank, kind, shape) for rank in range(size))
        for result in results:
            assert result.dtype == kind
            np.testing.assert_array_equal(result, sum(others, start=first))


def test_memory_goes_when_nobody_has_it() -> None:
    """And meanwhile it has no name, and belongs to this user alone."""
    store = dist.HashStore()
    gc.collect()  # what earlier tests have left
    before = _descriptors(), _maps()

    def use(world: ThreadCommunicator) -> tuple[int, int] | None:
        machine = _met(store, world.rank, 2)
        begins = [machine.prepare(np.zeros(n)) for n in range(100)]
        world._exchange(None)
        counted = (_descriptors(), _maps()) if world.rank == 0 else None
        world._exchange(None)
        del machine, begins
        return counted

    assert run_ranks(2, use)[0] == (before[0] + 2, before[1] + 2)
    assert (_descriptors(), _maps()) == before
    with shared_memory._offer_memory(2**16) as (offer, _):
        assert os.stat(offer["fd"]).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(offer["fd"])


def _descriptors() -> int:
    """The descriptors of such memory; other threads, which launch ranks, open and close others."""
    opened = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened += "memfd:multibn-" in os.readlink(descriptor)
    return opened


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:multibn-")


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_memory_of_another_process_is_not_taken_for_a_ranks(ended: int) -> None:
    with shared_memory._offer_memory(2**16) as (offer, _):
        assert shared_memory._open_memory(offer) is not None
        for other in (
            *({"name": "multibn-0"}, {"pid": ended}, {"pid": 1}, {"fd": 10_000}),
            {"nbytes": 2**17},
        ):
            assert shared_memory._open_memory(offer | other) is None
        for name in ("pid", "fd"):  # whoever can write to the store chooses no path
            with pytest.raises(ValueError, match="invalid literal for int"):
                shared_memory._open_memory(offer | {name: "self/../1"})
        with pytest.raises(PermissionError):  # sealed: those who read beyond an end would end
            os.ftruncate(offer["fd"], 2**12)
    assert shared_memory._open_memory(offer) is None
    assert shared_memory._open_memory({"pid": os.getpid()}) is None


@pytest.mark.parametrize("without", [0, 1])
def test_no_rank_has_memory_that_another_cannot_share(
    without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shared_memory, "unavailable_reason", lambda: "none" if _here.rank == without else None
    )

    assert _on_ranks(2, lambda machine: machine) == [None] * 2


def test_what_has_no_room_is_left_to_others() -> None:
    def prepare(machine: SharedMemory) -> list[bool]:
        return [machine.prepare(np.ones(n)) is None for n in (1, SLOT_NUMBERS, SLOT_NUMBERS + 9)]

    assert _on_ranks(2, prepare) == [[False, False, True]] * 2


def test_the_first_numbers_of_unlike_messages_are_summed() -> None:
    """The ranks see by these that their messages are unlike."""

    def sums(machine: SharedMemory) -> list[float]:
        a = np.arange(2.0 + 1000 * machine.rank)
        assert _begun(machine, a)(10.0)
        return a[:2].tolist()

    assert _on_ranks(2, sums) == [[0.0, 2.0]] * 2


def test_a_process_that_ended_is_noticed(ended: int) -> None:
    def lose(machine: SharedMemory) -> str:
        machine._pids[1] = ended
        if machine.rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
            _begun(machine, np.zeros(8))(10.0)
        return "noticed"

    assert _on_ranks(2, lose) == ["noticed", ""]


def test_a_rank_that_leaves_is_noticed_when_its_last_message_is_read() -> None:
    def leave(machine: SharedMemory) -> list[float]:
        a, b = np.ones((2, 1))
        done = _begun(machine, a)
        if machine.rank == 1:
            assert done(10.0)
            machine.close(failed=False)
            return [float(a[0])]
        time.sleep(0.1)
        assert done(10.0)
        with pytest.raises(RankLostError, match="rank 1 has left"):
            _begun(machine, b)(10.0)
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
    # On a busy machine, a thread that is awake may wait for a core; without the call, each is late.
    assert min(late) < 0.02, late


@pytest.mark.parametrize("can_tell", [True, False])
def test_cores_are_offered_for_long_where_there_are_enough(
    can_tell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores are those of the process, or of the machine where the system does not tell."""
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
    assert shared_memory.unavailable_reason() == "MULTIBN_SHARED_MEMORY is 0"
    monkeypatch.setenv("MULTIBN_SHARED_MEMORY", "no")
    with pytest.raises(ValueError, match="MULTIBN_SHARED_MEMORY must be 0 or 1: got 'no'"):
        shared_memory.unavailable_reason()
    monkeypatch.setenv("MULTIBN_SHARED_MEMORY", "1")
    monkeypatch.setattr(_platform.metadata, "distributions", lambda **_: [])  # no other one
    for where, name, instead, said in (
        (shared_memory, "_open_memory", lambda offer: None, "needs /proc: cannot open /proc/"),
        (os, "posix_fallocate", refuse, "cannot create shared memory: Cannot allocate"),
        (shared_memory, "core", None, "the C extension is missing. Install a C compiler"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, instead)
            assert said in str(shared_memory.unavailable_reason())
    monkeypatch.delattr(os, "memfd_create")
    assert shared_memory.unavailable_reason() == "needs Linux"
