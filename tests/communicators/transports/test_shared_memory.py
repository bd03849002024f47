"""Lines through shared memory, between threads: each opens the memory as a process would."""

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn.communicators.lines import HostArray, Line, Opening
from multibn.communicators.notices import RankLostError
from multibn.communicators.transports import shared_memory
from multibn.communicators.transports.shared_memory import Machines
from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks

require.need("torch")

import torch.distributed as dist  # noqa: E402

from multibn.communicators.transports.gloo import Side  # noqa: E402

if shared_memory.why_not() is not None:
    pytest.skip(str(shared_memory.why_not()), allow_module_level=True)


class Ranks:
    """Ranks that open the same lines and sum in them; gloo's lines lie between machines."""

    def __init__(self, rank: int, store: Any, size: int) -> None:
        self.rank, self._store, self.machines = rank, store, Machines(store, rank, size)
        self.opened: dict[tuple[int, ...], Side] = {}  # by the ranks of lines between machines

    def open(self, number: int, buffer: HostArray | None = None) -> Line:
        opening = self.opening(number, buffer)
        assert opening.done(10.0)
        assert opening.line is not None
        return opening.line

    def opening(self, number: int, buffer: HostArray | None = None) -> Opening:
        return Opening(self.machines.open_line(number, buffer, partial(self._between, number)))

    def _between(self, number: int, ranks: Sequence[int]) -> Generator[None, None, Line]:
        if (key := tuple(ranks)) not in self.opened:
            store = dist.PrefixStore(f"between {key}", self._store)
            self.opened[key] = Side(store, key.index(self.rank), len(key), None)
        return self.opened[key].open_line(number, 10.0)


def _on_ranks(size: int, function: Callable[[Ranks], Any]) -> tuple[list[Any], set[Any]]:
    """What the function returns on each rank, and between which ranks lines of gloo were opened."""
    store = dist.HashStore()
    opened: set[Any] = set()
    over = threading.Barrier(size)

    def run(world: ThreadCommunicator) -> Any:
        _here.rank = world.rank
        ranks = Ranks(world.rank, store, size)
        result = function(ranks)
        opened.update(ranks.opened)
        over.wait(60.0)
        for side in ranks.opened.values():
            side.close(failed=False)
        return result

    return run_ranks(size, run), opened


_here = threading.local()


def _pretend(monkeypatch: pytest.MonkeyPatch, machine_of: Sequence[int]) -> None:
    """Let ranks open only memory of ranks on the same machine."""
    offered, opened = shared_memory._offered, shared_memory._opened
    owners: dict[str, int] = {}

    @contextlib.contextmanager
    def offer(nbytes: int) -> Any:
        with offered(nbytes) as (mine, memory):
            owners[mine["name"]] = _here.rank
            yield mine, memory

    def open_(offer: dict[str, Any]) -> Any:
        same = machine_of[owners.get(offer.get("name", ""), 0)] == machine_of[_here.rank]
        return opened(offer) if same else None

    monkeypatch.setattr(shared_memory, "why_not", lambda: None)
    monkeypatch.setattr(shared_memory, "_offered", offer)
    monkeypatch.setattr(shared_memory, "_opened", open_)


def _message(rank: int, kind: str, shape: tuple[int, ...]) -> HostArray:
    rng = np.random.default_rng([rank, *shape])
    return np.asarray(100 * rng.standard_normal(shape)).astype(kind)


KINDS = ("float64", "float32", "int64", "int16", "uint8", "complex128")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 5), (516,), (517,), (20_000,))
LARGE = 2**16  # bytes: longer arrays go over another kind of line


@pytest.mark.parametrize("machine_of", [(0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 1, 0, 2)])
def test_sums_have_the_same_bits_on_all_ranks(
    machine_of: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine, those of a sum in the order of the ranks."""
    _pretend(monkeypatch, machine_of)
    size = len(machine_of)

    def sums(ranks: Ranks) -> list[HostArray]:
        everything, buffer = ranks.open(0), np.zeros(516)
        widths = ranks.open(516, buffer)
        results = []
        for i in range(4):  # each half of the slots twice
            if i == ranks.rank:
                time.sleep(0.01)
            buffer[:] = _message(ranks.rank, "float64", (516,))
            assert widths.begin(buffer)(10.0)
            results.append(buffer.copy())
        for kind in KINDS:
            for shape in SHAPES:
                a = _message(ranks.rank, kind, shape)
                assert everything.begin(a)(10.0)
                results.append(a)
        return results

    of_ranks, opened = _on_ranks(size, sums)
    cases = [("float64", (516,))] * 4 + [(kind, shape) for kind in KINDS for shape in SHAPES]
    for (kind, shape), results in zip(cases, zip(*of_ranks, strict=True), strict=True):
        messages = [_message(rank, kind, shape) for rank in range(size)]
        for result in results:
            assert result.dtype == kind
            np.testing.assert_array_equal(result, results[0])
            np.testing.assert_allclose(result, np.sum(messages, axis=0, dtype=kind), 1e-6, 1e-4)
        small = math.prod(shape) * np.dtype(kind).itemsize <= LARGE
        if len(set(machine_of)) == 1 and small:
            in_order = messages[0]
            for message in messages[1:]:
                in_order = in_order + message
            np.testing.assert_array_equal(results[0], in_order)
    firsts = sorted({machine_of.index(machine) for machine in machine_of})
    assert opened == {tuple(range(size))} | ({tuple(firsts)} if len(firsts) > 1 else set())


def test_memory_goes_when_nobody_has_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """And meanwhile it has no name, belongs to this user alone, and leaves nothing in the store."""
    store = dist.HashStore()
    gc.collect()  # what earlier tests have left
    before = _descriptors(), _maps()

    def use(world: ThreadCommunicator) -> tuple[int, int] | None:
        ranks = Ranks(world.rank, store, 2)
        lines = [ranks.open(number, np.zeros(max(number, 8))) for number in range(100)]
        world._exchange(None)
        counted = (_descriptors(), _maps()) if world.rank == 0 else None
        world._exchange(None)
        del ranks, lines
        return counted

    # Of 100 lines of two ranks.
    assert run_ranks(2, use)[0] == (before[0] + 2, before[1] + 2)
    assert (_descriptors(), _maps()) == before
    assert store.num_keys() == 0
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


@pytest.mark.parametrize("reason", ["a rank has none", "lines are too long"])
def test_another_line_is_opened_where_memory_cannot_be_shared(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "a rank has none":
        monkeypatch.setattr(shared_memory, "why_not", lambda: "none" if _here.rank else None)
    else:
        monkeypatch.setattr(shared_memory, "_NUMBERS", 1000)

    def total(ranks: Ranks) -> float:
        a = np.ones(2000)
        assert ranks.open(2000, a).begin(a)(10.0)
        return float(a[-1])

    totals, opened = _on_ranks(2, total)
    assert totals == [2.0, 2.0]
    assert opened == {(0, 1)}


def test_ranks_that_open_different_lines_do_not_meet() -> None:
    def opened(ranks: Ranks) -> bool:
        opening = ranks.opening(8 + ranks.rank, np.zeros(16))
        return opening.done(1.0) or opening.done(0.1)

    assert _on_ranks(2, opened)[0] == [False, False]


def test_unlike_arrays_are_not_added() -> None:
    arrays: list[list[Any]] = [
        [np.ones(3), np.ones(4)],
        [np.ones(4), np.ones(4, np.float32)],
    ]

    def sums(ranks: Ranks) -> list[bool]:
        results = []
        for number, unlike in enumerate(arrays):
            done = ranks.open(number).begin(unlike[ranks.rank])
            results += [done(0.5), done(0.01)]
        return results

    assert _on_ranks(2, sums)[0] == [[False] * 4] * 2


def test_a_process_that_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def lose(ranks: Ranks) -> str:
        line, a = ranks.open(8, np.zeros(8)), np.zeros(8)
        neighbours = ranks.machines._neighbours
        assert neighbours is not None
        neighbours._pids[1] = ended.pid
        if ranks.rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
            line.begin(a)(10.0)
        return "noticed"

    assert _on_ranks(2, lose)[0] == ["noticed", ""]


def test_a_process_that_ends_while_the_ranks_meet_is_noticed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for space, seconds, noticed in (
        (shared_memory.pid_space(), 10.0, True),
        ("other", 0.2, False),
    ):
        store = dist.HashStore()
        store.set("offer of 1", json.dumps({"pid": ended.pid, "pid_space": space}))
        store.add("number of offer", 1)
        opening = Ranks(0, store, 2).opening(0)
        if noticed:
            with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
                opening.done(seconds)
        else:  # on another machine, the number says nothing
            assert not opening.done(seconds)


def test_a_rank_that_leaves_is_noticed_when_its_last_message_is_read() -> None:
    def leave(ranks: Ranks) -> list[float]:
        line = ranks.open(0)
        a, b = np.ones((2, 1))
        done = line.begin(a)
        if ranks.rank == 1:
            assert done(10.0)
            ranks.machines.close(goodbye=True)
            return [float(a[0])]
        time.sleep(0.1)
        assert done(10.0)
        with pytest.raises(RankLostError, match="rank 1 has left"):
            line.begin(b)(10.0)
        return [float(a[0])]

    assert _on_ranks(2, leave)[0] == [[2.0], [2.0]]


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
    start = time.monotonic()
    assert not core.wait(at, 1, 0.1, yielding)
    assert 0.1 <= time.monotonic() - start < 5.0
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
