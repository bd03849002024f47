"""Waiting for the other ranks: with a deadline, and with a word about who did not come.

A rank that has waited for half a second tells the others in which call it waits, and reads their
notices. Two ranks that wait in different calls, or for a rank that has left, will never meet: that
is an error at once. Nothing is sent while all ranks come in time.
"""

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias
from weakref import WeakSet

from multibn._environment import process_state, this_machine
from multibn._typing import check_number

PATIENCE = 0.5  # seconds of waiting before a rank sends a notice
_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0  # seconds between two looks at the board, doubling
_LONGEST = 1e8  # seconds, three years: transports count nanoseconds in 64 bits

_BEGIN_ANEW = (
    "Begin anew on all ranks: start the program again, or, over torch.distributed and in a "
    "notebook, call destroy_process_group() and init_process_group()."
)

# Waits so many seconds at most, and says whether the collective is done.
Done: TypeAlias = Callable[[float], bool]


class Notice(NamedTuple):
    """What a rank tells the others."""

    state: str  # "waits", "failed" or "left"
    completed: int  # how many collectives the rank has completed
    place: str  # where the rank waits, equal on ranks that will meet
    text: str  # the place for people, or what went wrong
    counts: dict[str, int] = {}  # of a rank that waits: `completed` of each of its groups

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Notice":
        return cls(*json.loads(data))


class Board(Protocol):
    """Where ranks leave notices for each other; never blocks for long."""

    def publish(self, notice: Notice, /) -> None: ...

    def read(self) -> dict[int, Notice]:
        """The latest notice of each other rank that has left one."""

    def close(self) -> None:
        """Finish publishing before the process ends."""


class RankLeftError(RuntimeError):
    """A rank has let go of the group, in order, while this rank waits for a message from there."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has left")
        self.rank = rank


class Watch:
    """The collectives of one group of processes, as one rank sees them.

    Attributes
    ----------
    rank, size
        Of this process among the group.
    board
        Where the notices are; None until the transport has one.
    completed
        How many collectives this rank has completed. A collective needs every rank, so the other
        ranks are at most one ahead or behind.
    failure
        The error message of the first failure, None before: no later collective can be trusted.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.board: Board | None = None
        self.completed = 0
        self.failure: str | None = None
        self._launcher = _launcher()
        self._peers: list[tuple[str, int]] = []  # machine and pid of each rank
        self._key = ""  # of the group, equal on its ranks
        self._last: object = "the start"  # str() gives the text
        self._last_at = time.monotonic()

    def introduce(self, allgather: Callable[[Any], list[Any]]) -> None:
        """Learn every rank's machine and pid. Collective."""
        members = allgather((this_machine(), os.getpid(), secrets.token_hex(8)))
        self._peers = [(machine, pid) for machine, pid, _ in members]
        self._key = members[0][2]
        _watches.add(self)

    def wait(self, begin: Callable[[], Done], place: str, text: object, timeout: float) -> None:
        """Begin a collective, and return when it is done.

        `place` is equal on ranks that will meet; `str(text)`, the same for people, is computed only
        where somebody is to read it. Raises TimeoutError after `timeout` seconds, ConnectionError
        if a rank was lost or has left, and RuntimeError if another rank waits in another place, or
        after an earlier failure. An exception of another kind, KeyboardInterrupt for example, is a
        failure too: the message stays under way, and later ones would meet it.
        """
        if self.failure is not None:
            self.check(text)
        if self._launcher and os.getppid() != self._launcher:
            self._fail(
                ConnectionError,
                f"the launcher of rank {self.rank} (pid {self._launcher}) has ended: nobody would "
                f"end this process if another rank failed. It ends in {text}.",
            )
        try:
            done = begin()
            if not done(min(PATIENCE, timeout)):
                self._wait_long(done, place, str(text), timeout)
            self.completed += 1
            self._last, self._last_at = text, time.monotonic()
        except BaseException as error:
            if self.failure is None:
                if isinstance(error, RuntimeError):
                    self._lost(str(text), error)
                self._note_failure(
                    f"rank {self.rank} was interrupted in {text} by {type(error).__name__}, and "
                    f"the message is still under way. {_BEGIN_ANEW}"
                )
            raise

    def check(self, text: object) -> None:
        """Raise RuntimeError after a failure."""
        if self.failure is not None:
            raise RuntimeError(
                f"rank {self.rank} cannot communicate any more, at {text}: {self.failure}"
            )

    def leave(self) -> None:
        """Tell the others that this process ends."""
        if self.failure is None and self.board is not None:
            self._publish("left", "", str(self._last))
            self.board.close()  # after a failure, which may be a broken network, nobody waits

    def _publish(self, state: str, place: str, text: str) -> None:
        if self.board is not None:
            waits = _watches if state == "waits" else ()
            counts = {watch._key: watch.completed for watch in list(waits)}
            self.board.publish(Notice(state, self.completed, place, text, counts))

    def _wait_long(self, done: Done, place: str, text: str, timeout: float) -> None:
        deadline = time.monotonic() + max(timeout - PATIENCE, 0.0)
        self._publish("waits", place, text)
        pause = _FIRST_LOOK
        while not done(min(pause, max(deadline - time.monotonic(), 0.0))):
            notices = self.look(place, text)
            if time.monotonic() >= deadline:
                self._miss(notices, text, timeout)
            pause = min(2 * pause, _LAST_LOOK)

    def _notices(self) -> dict[int, Notice]:
        """The notices of ranks that wait in the same collective, and of those that will not come.

        A rank that has failed may be one collective behind: its message was under way already.
        """
        board = self.board.read() if self.board is not None else {}
        return {
            r: n for r, n in board.items() if n.completed == self.completed or n.state == "failed"
        }

    def _check_for_end(self, text: str, notices: dict[int, Notice], left: list[int]) -> None:
        """Raise if a rank will not come, because its program has ended or has failed."""
        if left := left or [r for r, n in notices.items() if n.state == "left"]:
            self._fail(
                ConnectionError,
                f"rank {self.rank} waits in {text} for rank(s) {left}, whose program ended before "
                f"it came there: {self._describe(left, 'left')}. All ranks must take the same "
                "number of steps; see `join` for data of unequal length.",
            )
        for rank, notice in notices.items():
            if notice.state == "failed":
                self._fail(RuntimeError, f"rank {rank} has failed: {notice.text}")

    def look(self, place: str, text: str) -> dict[int, Notice]:
        """The others' notices; raises if one of them says that its rank will not come."""
        notices = self._notices()
        self._check_for_end(text, notices, [])
        elsewhere = {r: n for r, n in notices.items() if n.place != place}
        if elsewhere:
            others = "; ".join(f"rank {r} is in {n.text}" for r, n in elsewhere.items())
            self._fail(
                RuntimeError,
                f"the ranks are in different places: rank {self.rank} is in {text}; {others}. All "
                "ranks must run the same layers in the same order, in training or not.",
            )
        self._check_other_groups(text, notices)
        return notices

    def _check_other_groups(self, text: str, notices: dict[int, Notice]) -> None:
        """Raise if this rank waits here for one that waits for this rank in another group."""
        for other in list(_watches):
            if other is self or other.failure is not None:
                continue
            for member, notice in other._notices().items():
                # In no thread of its process has that rank completed the collective of this group.
                peer, completed = other._peers[member], notice.counts.get(self._key)
                if completed != self.completed or peer == self._peers[self.rank]:
                    continue
                rank = self._peers.index(peer)
                if rank in notices:
                    continue
                message = (
                    f"the ranks are in different places: rank {self.rank} is in {text}, and waits "
                    f"for rank {rank} of {self.size}; rank {rank} is in {notice.text}, and waits "
                    f"for rank {self.rank} in another group, of {other.size} ranks. All ranks must "
                    "use the same groups, and run the same layers, in the same order."
                )
                other.failure = message  # the message of that rank stays under way
                other._publish("failed", "", message)
                self._fail(RuntimeError, message)

    def _miss(self, notices: dict[int, Notice], text: str, timeout: float) -> NoReturn:
        absent = [r for r in range(self.size) if r != self.rank and r not in notices]
        self._fail(
            TimeoutError,
            f"rank {self.rank} has waited {timeout:g} s in {text} for rank(s) {absent}: "
            f"{self._describe(absent)}. Find out what keeps it, or allow for more time: "
            "MULTIBN_TIMEOUT, or the communicator's `timeout`.",
        )

    def _lost(self, text: str, error: RuntimeError) -> NoReturn:
        others = [r for r in range(self.size) if r != self.rank]
        gone: list[int] = []
        left = [error.rank] if isinstance(error, RankLeftError) else []
        for _ in range(5):  # a connection may break a little before its process is seen to end
            self._check_for_end(text, self._notices(), left)
            gone = [r for r in others if self._state(r) == "has ended"]
            if gone:
                break
            time.sleep(0.01)
        gone = gone or others  # any of the others may be lost
        self._fail(
            ConnectionError,
            f"rank {self.rank} lost the connection in {text}: {self._describe(gone)}. "
            f"The transport says: {error}",
            error,
        )

    def _fail(
        self, kind: type[Exception], message: str, cause: BaseException | None = None
    ) -> NoReturn:
        self._note_failure(message)
        raise kind(message) from cause

    def _note_failure(self, message: str) -> None:
        self.failure = message
        # Before all else: a launcher that sees one process end stops the others at once.
        _announce(message)
        self._publish("failed", "", message)

    def _describe(self, ranks: list[int], how: str = "") -> str:
        seen = f"last seen {time.monotonic() - self._last_at:.1f} s ago in {self._last}"
        if not self._peers:
            return f"no rank was heard of before, {seen}"
        return "; ".join(
            f"rank {r} (machine {self._peers[r][0].split()[0]}, pid {self._peers[r][1]}) "
            f"{how or self._state(r)}, {seen}"
            for r in ranks
        )

    def _state(self, rank: int) -> str:
        """What the operating system says of a process of this machine."""
        machine, pid = self._peers[rank] if self._peers else ("", 0)
        if machine != this_machine() or not Path("/proc/self/stat").exists():
            return "is on another machine" if self._peers else "is not known"
        return {"T": "is stopped", "": "has ended"}.get(process_state(pid), "is running")


_watches: WeakSet[Watch] = WeakSet()  # whose ranks know each other


def fail(kind: type[Exception], message: str) -> NoReturn:
    """Raise an error that tells a person about the ranks, with its message as a line on stderr.

    The traceback may be long, and stand among those of other ranks. So the message is also the
    first line that a rank prints, and, where the error ends the program, the last one.
    """
    _announce(message)
    raise kind(message)


def poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` becomes true within that time."""
    deadline = time.monotonic() + seconds
    nap = 1e-4
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(nap)
        nap = min(1.5 * nap, 0.02)
    return True


_announced: set[str] = set()


def _announce(message: str) -> None:
    _announced.add(message)
    _print(message)


def announce_end() -> None:
    """Print an announced message again, if its error ends the program."""
    error = uncaught()
    while error is not None and str(error) not in _announced:
        error = error.__cause__ or error.__context__
    if error is not None:
        _print(str(error))


def uncaught() -> BaseException | None:
    """The exception that has ended the program, once the program has ended."""
    # Python keeps such an exception here; so do interactive shells and test runners, with those
    # that they have caught: the traceback then begins in a function that somebody has called.
    trace = getattr(sys, "last_traceback", None)
    if trace is None or trace.tb_frame.f_back is not None:
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def _print(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader may have ended
        sys.stderr.flush()
        os.write(2, f"multibn: {message}\n".encode())


def _launcher() -> int:
    """The process that has started this one as a rank; 0 where that is not certain.

    A shell that starts ranks in the background may end before them; these launchers may not.
    """
    known = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return os.getppid() if any(name in os.environ for name in known) else 0


def check_timeout(value: Any = None, /) -> float:
    """`value` in seconds, default MULTIBN_TIMEOUT, or 300; raises unless it is positive.

    Infinity stands for a hundred million seconds.
    """
    if value is not None:
        check_number("timeout", value, "(0, inf]")
        return min(float(value), _LONGEST)
    text = os.environ.get("MULTIBN_TIMEOUT", "300")
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return min(float(text), _LONGEST)
    raise ValueError(f"MULTIBN_TIMEOUT must be a positive number of seconds: got {text!r}.")
