"""Waiting with a deadline, over ranks as threads: what is said when the others do not come."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from multibn.communicators.polling import poll
from multibn.communicators.watchdog import RankLostError, Status, Watchdog, check_timeout
from tests.helpers.ranks import ThreadCommunicator, run_ranks

pytestmark = pytest.mark.alone


class StatusBoard:
    """Notices of threads."""

    def __init__(self, notices: dict[int, Status], rank: int) -> None:
        self._notices, self._rank = notices, rank

    def publish(self, notice: Status, /) -> None:
        self._notices[self._rank] = notice

    def read(self) -> dict[int, Status]:
        others = dict(self._notices)
        others.pop(self._rank, None)
        return {r: Status(*json.loads(json.dumps(n))) for r, n in others.items()}


def _watchdog(rank: int, size: int, notices: dict[int, Status] | None = None) -> Watchdog:
    board = None if notices is None else StatusBoard(notices, rank)
    return Watchdog(SimpleNamespace(rank=rank, size=size, board=board))


def _introduced(world: ThreadCommunicator, notices: dict[int, Status], pid: int = 0) -> Watchdog:
    watchdog = _watchdog(world.rank, world.size, notices)
    watchdog.exchange_pids(world._exchange)
    if pid:
        watchdog._peers[1] = *watchdog._peers[1][:2], pid
    return watchdog


def _never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _begin() -> Callable[[float], bool]:
    return _never


def _broken(error: Exception) -> Callable[[], Callable[[float], bool]]:
    """A message that ends in an error."""

    def wait(seconds: float) -> bool:
        raise error

    return lambda: wait


def _says(function: Callable[..., Any], *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("no error")


_LEFT = (
    r"ConnectionError: rank 0 waits in b \(forward\) for rank\(s\) \[1\], which have already "
    r"exited or left the group: rank 1 \(machine \S+, pid \d+\) left, last seen \d\.\d s ago in "
    r"a \(forward\)\. All ranks must take the same number of steps; with torch, `join` handles "
    r"uneven data\."
)


def _publishes(number: int, reason: str) -> Callable[[Watchdog], None]:
    return lambda watchdog: watchdog.transport.board.publish(Status("failed", number, reason))


def _closes(error: BaseException | None) -> Callable[[Watchdog], None]:
    return lambda watchdog: watchdog.close(error)


_ENDED = "RuntimeError: rank 1 has failed: its program ended with"
_SEEN = _broken(RankLostError(1, has_left=True))
# What rank 1 does with its watchdog (bool: nothing), rank 0's message, and what rank 0 says.
_ENDS: dict[str, tuple[Any, Any, str]] = {
    "its notice": (_publishes(0, "a reason"), _begin, "RuntimeError: rank 1 has failed: a reason"),
    # The others are not told to take the same number of steps.
    "an error of its program": (
        _closes(RuntimeError("in a worker\nTrace\nValueError: shape")),
        *(_begin, rf"{_ENDED} RuntimeError: in a worker \.\.\. ValueError: shape"),
    ),
    "it has left": (_closes(None), _begin, _LEFT),
    "a transport has seen it leave": (bool, _SEEN, _LEFT),
    "and it has said why": (_closes(KeyError("x")), _SEEN, f"{_ENDED} KeyError: 'x'"),
    "its connection is lost": (
        *(bool, _broken(RuntimeError("reset by peer"))),
        r"ConnectionError: rank 0 lost the connection in b \(forward\): rank 1 \(machine \S+, pid "
        r"\d+\) is running, last seen \d\.\d s ago in a \(forward\)\. The transport says: reset by "
        r"peer",
    ),
    # Rank 1 has told of rank 3 and ended, before rank 0 looks.
    "another one was lost before": (
        *(_publishes(1, "rank 1 lost rank 3"), _broken(RankLostError(1))),
        "RuntimeError: rank 1 has failed: rank 1 lost rank 3",
    ),
}


@pytest.mark.parametrize("how", _ENDS)
def test_a_rank_that_will_not_come_is_named_with_its_reason(how: str) -> None:
    (end, begin, told), gone, notices = _ENDS[how], threading.Event(), dict[int, Status]()

    def wait(world: ThreadCommunicator) -> Exception | None:
        watchdog = _introduced(world, notices)
        watchdog.wait(lambda: lambda seconds: True, "a (forward)")
        if world.rank == 1:
            end(watchdog)
            gone.set()
            return None
        gone.wait(10)
        return _says(watchdog.wait, begin, "b (forward)")

    error = run_ranks(2, wait)[0]
    assert re.fullmatch(told, f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "state",
    [
        *("is running", "is stopped", "has ended", "is on another machine"),
        "is in another container",
    ],
)
def test_a_deadline_says_who_did_not_come(state: str) -> None:
    """The message says who did not come, and what can be seen of its process."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if state == "is stopped":
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
    if state == "has ended":
        other.kill()
        other.wait()

    def wait(world: ThreadCommunicator) -> Exception | None:
        watchdog = _introduced(world, {}, other.pid)
        if world.rank == 1:
            return None
        if state == "is on another machine":
            watchdog._peers[1] = "elsewhere boot", *watchdog._peers[1][1:]
        if state == "is in another container":
            watchdog._peers[1] = watchdog._peers[1][0], "another", watchdog._peers[1][2]
        watchdog.timeout = 0.7
        return _says(watchdog.wait, _begin, "layer1.0.bn1 (forward, float32, call 7)")

    error = run_ranks(2, wait)[0]
    other.kill()
    other.communicate()
    assert isinstance(error, TimeoutError)
    assert re.fullmatch(
        r"rank 0 has waited 0\.7 s in layer1\.0\.bn1 \(forward, float32, call 7\) for rank\(s\) "
        rf"\[1\]: rank 1 \(machine \S+, pid {other.pid}\) {state}, last seen \d\.\d s ago in the "
        r"rendezvous of the group\. Possible causes: on that rank the model is in eval\(\) "
        r"\(Chainer: train=False\) or was not converted, and sends no messages; torch\.compile "
        r"recompiles there; or rank 0 runs validation alone with a model that is not in "
        r"eval\(\)\. To wait longer, set MULTIBN_TIMEOUT \(seconds\)\.",
        str(error),
    )


def test_who_waits_says_one_word_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The deadline comes long after the word: a busy machine may stop this process in between.
    monkeypatch.setattr("multibn.communicators.watchdog.SECONDS_UNTIL_STATUS", 0.1)
    monkeypatch.setattr("multibn.communicators.watchdog.SECONDS_UNTIL_LOG", 0.2)
    watchdog = _watchdog(0, 2)
    watchdog.timeout = 0.9
    for call in (1, 2):
        error = str(_says(watchdog.wait, _begin, f"bn (forward, float32, call {call})"))
        watchdog.failure = None  # another wait of its own
        said, last = capfd.readouterr().err.splitlines()
        begin = (
            f"multibn: rank 0 has waited 0.2 s in bn (forward, float32, call {call}) for rank(s)"
        )
        rest = " [1]: no rank of the group has connected yet."
        assert said == f"{begin}{rest} This becomes an error after 0.9 s."
        assert last == said.replace("waited 0.2", "waited 0.9").partition(" This becomes")[0]
        assert f"multibn: {error}".startswith(f"{last} Possible causes: ")  # said once


def test_who_ends_by_an_error_repeats_what_failed_on_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error may be DistributedDataParallel's, of a connection that another rank has closed."""
    told = {1: Status("failed", 3, "rank 1 has waited 3 s")}
    told[2] = Status("failed", 3, "its program ended with TimeoutError: rank 2 has waited")
    watchdog = _watchdog(0, 3, told)
    watchdog.close(RuntimeError("Connection closed by peer"))
    assert capfd.readouterr().err == "multibn: rank 1 has failed: rank 1 has waited 3 s\n"


def test_a_message_that_all_ranks_wait_for_is_the_transports_fault(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multibn.communicators.watchdog.SECONDS_UNTIL_LOG", 0.5)
    watchdog = _watchdog(0, 2, {1: Status("waits", 0, "a (forward)")})
    watchdog.timeout = 1.2
    error = _says(watchdog.wait, _begin, "a (forward)")
    assert isinstance(error, TimeoutError)
    delivered = (
        "a (forward). All ranks are in this call, but the transport has not delivered the me"
    )
    assert str(error).startswith(f"rank 0 has waited 1.2 s in {delivered}")
    assert "store of torch.distributed still has the keys of an earlier process gr" in str(error)
    assert "Restart all ranks. Without a restart, in a notebook for example: with " in str(error)
    said, _ = capfd.readouterr().err.splitlines()
    assert said.startswith(f"multibn: rank 0 has waited 0.5 s in {delivered}")
    assert said.endswith(" This becomes an error after 1.2 s.")


def test_a_call_that_is_under_way_is_not_the_last_one() -> None:
    def wait(world: ThreadCommunicator) -> None:
        watchdog, phase = _introduced(world, {}), ["call 1"]  # whose text changes, as a layer's
        watchdog.wait(lambda: lambda seconds: True, phase)
        phase[0] = "call 2"
        error = _says(watchdog.wait, _broken(RuntimeError("reset by peer")), phase)
        assert re.search(r"in \['call 2'\]: rank . .* s ago in the call before\. The", str(error))

    run_ranks(2, wait)


def test_a_rank_that_a_transport_has_seen_to_end_is_the_only_one_named() -> None:
    def wait(world: ThreadCommunicator) -> str:
        watchdog = _introduced(world, {})
        return str(_says(watchdog.wait, _broken(RankLostError(2)), "a (forward)"))

    for error in run_ranks(4, wait):
        assert re.fullmatch(
            r"rank \d lost the connection in a \(forward\): rank 2 \(machine \S+, pid \d+\) [^;]*, "
            r"last seen [^;]*\. The transport says: the process of rank 2 has ended",
            error,
        )


def test_ranks_that_look_for_a_lost_one_are_not_named() -> None:
    """The ranks are on other machines, whose processes nobody here can see."""
    notices: dict[int, Status] = {}

    def wait(world: ThreadCommunicator) -> str:
        watchdog = _introduced(world, notices)
        watchdog._peers = [(f"machine{r}", *peer[1:]) for r, peer in enumerate(watchdog._peers)]
        if world.rank == 3:
            return ""
        broken = _broken(RuntimeError("reset by peer"))
        return str(_says(watchdog.wait, broken, "a (forward)"))

    *errors, _ = run_ranks(4, wait)
    for error in errors:
        assert "rank 3 (machine machine3, pid " in error, error
        assert not re.search(r"rank [012] \(machine", error), error


def test_a_poll_sees_soon() -> None:
    """Ranks wait for an event at each message: what comes in a millisecond is seen in few more."""
    seconds = []
    for _ in range(20):
        event = time.monotonic() + 1e-3
        assert poll(functools.partial(_is_over, event), 10.0)
        seconds.append(time.monotonic() - event)
    assert min(seconds) < 0.02


def _is_over(event: float) -> bool:
    return time.monotonic() > event


@pytest.mark.parametrize("timeout", [0.1, 0.6])
def test_a_deadline_holds_before_the_ranks_know_each_other(timeout: float) -> None:
    start = time.monotonic()
    watchdog = _watchdog(0, 1000)
    watchdog.timeout = timeout
    error = _says(watchdog.wait, _begin, "the first exchange")
    assert timeout <= time.monotonic() - start < timeout + 30.0
    assert re.match(
        rf"rank 0 has waited {timeout:g} s in the first exchange for rank\(s\) \[1, 2, 3, 4, 5, 6, "
        r"7, 8\] and 991 more: no rank of the group has connected yet\.",
        str(error),
    )


def test_a_timeout_is_a_positive_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIBN_TIMEOUT", raising=False)
    assert check_timeout() == 300
    monkeypatch.setenv("MULTIBN_TIMEOUT", "1.5")
    assert check_timeout() == 1.5
    for endless in ("inf", "1e300", "1e10"):  # transports would overflow
        monkeypatch.setenv("MULTIBN_TIMEOUT", endless)
        assert check_timeout() == 1e8
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("MULTIBN_TIMEOUT", wrong)
        message = f"MULTIBN_TIMEOUT must be a positive number of seconds: got '{wrong}'"
        with pytest.raises(ValueError, match=message):
            check_timeout()


def test_a_wait_takes_no_core() -> None:
    used = time.thread_time()
    assert not poll(lambda: False, 0.2)
    assert time.thread_time() - used < 0.05
