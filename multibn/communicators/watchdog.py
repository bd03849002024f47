"""Wait for the other ranks with a deadline, and report which ranks are missing.

After waiting for half a second, a rank publishes its current call, and reads the status of the
other ranks. If one of them has left or failed, the waiting rank raises at once. After 20 s, it logs
to stderr which ranks it is waiting for. If all ranks arrive in time, no status is sent.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from multibn._platform import pid_space, process_state, this_machine
from multibn.communicators.diagnostics import log_to_stderr
from multibn.communicators.polling import Poll

SECONDS_UNTIL_STATUS = 0.5  # of waiting, until a rank publishes its status
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two reads of the board; doubles
SECONDS_UNTIL_LOG = 20.0  # of waiting, until a rank logs a line to stderr
_FIND_LOST_SECONDS = 0.5  # for finding out which rank was lost, perhaps from other ranks
_MAX_RANKS_LISTED = 8  # in an error
_MAX_TIMEOUT = 1e8  # seconds, three years: transports count nanoseconds in 64 bits

_ENDED = "its program ended with "
_RESTART = (
    "Restart all ranks. Without a restart, in a notebook for example: with torch.distributed, call "
    "destroy_process_group() and init_process_group() with a new store, init_method='file://' and "
    "the path of a new file for example; with MPI, give the layers comm.Dup()."
)


class Status(NamedTuple):
    """A rank's status, as published to the other ranks in JSON."""

    state: str  # "waits", "searches" (for a lost rank), "failed" or "left"
    completed: int  # number of collectives that the rank has completed
    text: str  # where the rank waits, or what went wrong


class StatusBoard(Protocol):
    """Passes status notices between ranks, without blocking for long."""

    def publish(self, notice: Status, /) -> None:
        """Publish this rank's status, which replaces the one before."""

    def read(self) -> dict[int, Status]:
        """Return the latest status of each other rank that has published one."""


class RankLostError(RuntimeError):
    """The transport has detected that a rank's process has ended, or that the rank `has_left`.

    A rank that has left has closed the group properly, while this rank still waits for a message.
    """

    def __init__(self, rank: int, *, has_left: bool = False) -> None:
        what = f"rank {rank} has left" if has_left else f"the process of rank {rank} has ended"
        super().__init__(what)
        self.rank, self.has_left = rank, has_left


class Watchdog:
    """Runs this rank's collectives over a `Transport`, with deadlines and status notices."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.timeout = check_timeout()
        # Number of collectives that this rank has completed. A collective needs every rank, so the
        # other ranks are at most one ahead or behind.
        self.completed = 0
        # The message of the first error, after which every collective raises.
        self.failure: str | None = None
        self._peers: list[tuple[str, str, int]] = []  # machine, pid_space and pid of each rank
        self.token = ""  # identifies this group in this run; equal on all ranks
        self._last: object = "the rendezvous of the group"  # str() gives the text
        self._last_at = time.monotonic()

    def exchange_pids(self, allgather: Callable[[Any], list[Any]]) -> None:
        """Exchange process ids, and agree on the token. Collective."""
        gathered = allgather((secrets.token_hex(8), this_machine(), pid_space(), os.getpid()))
        self._peers, self.token = [(*each[1:],) for each in gathered], gathered[0][0]

    def wait(self, begin: Callable[[], Poll | None], text: object) -> None:
        """Begin a collective, and return when it is done.

        `str(text)` says where this rank is; it is computed only if a message needs it. Raises
        TimeoutError at the deadline, ConnectionError if a rank was lost or has left, and
        RuntimeError if another rank has failed, or after an earlier failure. Any other
        exception, KeyboardInterrupt for example, is a failure, too: the message stays pending, and
        would be confused with later ones.
        """
        if self.failure is not None:
            raise RuntimeError(
                f"rank {self.transport.rank} can no longer communicate (in {text}), because of an "
                f"earlier failure: {self.failure}"
            )
        try:
            done = begin()
            if done is not None and not done(min(SECONDS_UNTIL_STATUS, self.timeout)):
                self._wait_long(done, str(text))
            self.completed += 1
            self._last, self._last_at = text, time.monotonic()
        except BaseException as error:
            if self.failure is None:
                # Without a board, the error is that of a user's class, and is left as it is.
                if isinstance(error, RuntimeError) and self.transport.board is not None:
                    self._raise_lost(str(text), error)
                self._record_failure(
                    f"rank {self.transport.rank} was interrupted in {text} by "
                    f"{type(error).__name__}, and the message is still pending. {_RESTART}"
                )
            raise

    def close(self, error: BaseException | None) -> None:
        """Publish that this process exits, normally or with an `error`."""
        if self.failure is None and self.transport.board is not None:
            if error is None or isinstance(error, SystemExit):
                self._publish("left", self._last_text())
            else:
                first, *more = f"{type(error).__name__}: {error}".splitlines()
                # The last line of an error of a DataLoader worker names the cause.
                summary = f"{first} ... {more[-1]}" if more else first
                for rank, notice in self._read().items():
                    if notice.state == "failed" and not notice.text.startswith(_ENDED):
                        log_to_stderr(f"rank {rank} has failed: {notice.text}")
                self._publish("failed", _ENDED + summary)

    def _publish(self, state: str, text: str) -> None:
        if self.transport.board is not None:
            self.transport.board.publish(Status(state, self.completed, text))

    def _wait_long(self, done: Poll, text: str) -> None:
        deadline = time.monotonic() + max(self.timeout - SECONDS_UNTIL_STATUS, 0.0)
        log_at = deadline - self.timeout + SECONDS_UNTIL_LOG
        self._publish("waits", text)
        pause = _FIRST_PAUSE
        while not done(min(pause, max(deadline - time.monotonic(), 0.0))):
            notices = self.check_notices(text)
            if time.monotonic() >= deadline:
                waited, causes = self._waited(self.timeout, notices, text)
                self._fail(TimeoutError, waited, causes)
            if time.monotonic() >= log_at:
                log_at = math.inf
                waited, _ = self._waited(SECONDS_UNTIL_LOG, notices, text)
                log_to_stderr(f"{waited} This becomes an error after {self.timeout:g} s.")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _notices(self) -> dict[int, Status]:
        """Return the status of the ranks that wait in this collective, have left it, or failed.

        A failed rank may be one collective behind, if it failed after it had sent its message.
        """
        return {
            r: n
            for r, n in self._read().items()
            if (n.completed == self.completed and n.state != "searches") or n.state == "failed"
        }

    def _read(self) -> dict[int, Status]:
        return self.transport.board.read() if self.transport.board is not None else {}

    def _check_for_end(self, text: str, notices: dict[int, Status]) -> None:
        """Raise if a rank has left or failed, and so will not take part."""
        if left := [r for r, n in notices.items() if n.state == "left"]:
            self._fail(
                ConnectionError,
                f"rank {self.transport.rank} waits in {text} for rank(s) {_list_ranks(left)}, "
                "which have already exited or left the group: "
                f"{self._describe(text, left, 'left')}. All ranks must take the same number of "
                "steps; with torch, `join` handles uneven data.",
            )
        for rank, notice in notices.items():
            if notice.state == "failed":
                # The notice may itself report the failure of a third rank.
                relayed = notice.text.startswith("rank ") and " has failed: " in notice.text
                prefix = "" if relayed else f"rank {rank} has failed: "
                self._fail(RuntimeError, prefix + notice.text)

    def check_notices(self, text: str) -> dict[int, Status]:
        """Return the other ranks' notices; raise if one of these ranks has left or failed."""
        notices = self._notices()
        self._check_for_end(text, notices)
        return notices

    def _waited(self, seconds: float, notices: dict[int, Status], text: str) -> tuple[str, str]:
        """Return which ranks are missing, and the possible causes with what to do."""
        rank, size = self.transport.rank, self.transport.size
        waited = f"rank {rank} has waited {seconds:g} s in {text}"
        absent = [r for r in range(size) if r not in {rank, *notices}]
        if not absent:
            return (
                f"{waited}. All ranks are in this call, but the transport has not delivered the "
                "message.",
                "Possible cause: the store of torch.distributed still has the keys of an earlier "
                f"process group. {_RESTART}",
            )
        return (
            f"{waited} for rank(s) {_list_ranks(absent)}: {self._describe(text, absent)}.",
            "Possible causes: on that rank the model is in eval() (Chainer: train=False) or was "
            "not converted, and sends no messages; torch.compile recompiles there; or rank "
            f"{rank} runs validation alone with a model that is not in eval(). To wait "
            "longer, set MULTIBN_TIMEOUT (seconds).",
        )

    def _raise_lost(self, text: str, error: RuntimeError) -> NoReturn:
        gone, lost = [error.rank] if isinstance(error, RankLostError) else [], list[int]()
        if getattr(error, "has_left", False):
            self._check_for_end(text, {r: n for r, n in self._notices().items() if r in gone})
            self._check_for_end(text, {gone[0]: Status("left", self.completed, "")})
        # Publish that this rank is alive, so that the other ranks do not blame it.
        self._publish("searches", text)
        end = time.monotonic() + _FIND_LOST_SECONDS
        rank = self.transport.rank
        others = [r for r in range(self.transport.size) if r != rank]
        while not lost:
            # A connection may break before the process ends, or before its notice arrives.
            notices = self._notices()
            self._check_for_end(text, {r: notices[r] for r in gone or notices if r in notices})
            states = {r: self._state(r) for r in others}
            lost = gone or [r for r in others if states[r] == "has ended"]
            if not lost and time.monotonic() >= end:  # blame all not known to be alive
                living = [r for r, n in self._read().items() if n.state == "searches"]
                living += [r for r in others if states[r] == "is running"]
                lost = [r for r in others if r not in living] or others
            time.sleep(0.01)
        self._fail(
            ConnectionError,
            f"rank {rank} lost the connection in {text}: {self._describe(text, lost)}. "
            f"The transport says: {error}",
            cause=error,
        )

    def _fail(
        self, kind: type[Exception], message: str, more: str = "", cause: Any = None
    ) -> NoReturn:
        """Raise an error of `message` and `more`; other ranks and stderr get only `message`."""
        self._record_failure(message)
        self.failure = f"{message} {_RESTART}"  # for later calls, if the caller catches this error
        raise kind(f"{message} {more}".rstrip()) from cause

    def _record_failure(self, message: str) -> None:
        self.failure = message
        # Log first: a launcher that sees another rank exit may kill this process at any time.
        log_to_stderr(message)
        self._publish("failed", message)

    def _describe(self, text: str, ranks: list[int], how: str = "") -> str:
        # A layer's phase is one object, whose text is already that of the current call.
        last = "the call before" if text == self._last_text() else self._last_text()
        seen = f"last seen {time.monotonic() - self._last_at:.1f} s ago in {last}"
        if not self._peers:
            return "no rank of the group has connected yet"
        return "; ".join(
            f"rank {r} (machine {self._peers[r][0].split()[0]}, pid {self._peers[r][2]}) "
            f"{how or self._state(r)}, {seen}"
            for r in ranks[:_MAX_RANKS_LISTED]
        )

    def _last_text(self) -> str:
        try:
            return str(self._last)
        except ReferenceError:
            return "a layer that has been deleted"

    def _state(self, rank: int) -> str:
        """Return the state of a rank's process according to this machine's operating system."""
        if not self._peers or not Path("/proc/self/stat").exists():
            return "is not known"
        machine, space, pid = self._peers[rank]
        if machine != this_machine():
            return "is on another machine"
        if space != pid_space():
            return "is in another container"
        return {"T": "is stopped", "": "has ended"}.get(process_state(pid), "is running")


def _list_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_RANKS_LISTED} more" if len(ranks) > _MAX_RANKS_LISTED else ""
    return f"{ranks[:_MAX_RANKS_LISTED]}{more}"


def check_timeout() -> float:
    """Return MULTIBN_TIMEOUT in seconds: positive, 300 by default, and at most `_MAX_TIMEOUT`."""
    text = os.environ.get("MULTIBN_TIMEOUT", "300")
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return min(float(text), _MAX_TIMEOUT)
    raise ValueError(f"MULTIBN_TIMEOUT must be a positive number of seconds: got {text!r}.")
