"""Starts ranks, waits for what becomes of them, and leaves none behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from faults.scenarios import SCENARIOS
from multibn._launch import LAUNCHERS, launch_command, started

_START, _END = 60.0, 6.0  # seconds for ranks to start, and to end
# Seconds after the fault: a peer that has not ended by then hangs. Launchers take longer.
_TODAY, _TODAY_ENDS = 3.0, 6.0


@dataclass
class Rank:
    """What became of one rank in one scenario.

    Attributes
    ----------
    how
        "ok", "error", "SIGABRT" and the like, "ended" by somebody, "is stopped", or "hangs".
    says
        The error.
    seconds
        From the fault to the end.
    off, digest
        Of a rank that is ok: the largest error of its numbers, and what tells them from others.
    ended
        Whether its process has ended.
    """

    how: str
    says: str = ""
    seconds: float = 0.0
    off: float = 0.0
    digest: str = ""
    ended: bool = False


@dataclass
class Outcome:
    """What became of a scenario."""

    scenario: str
    library: str
    over: str
    framework: str
    ranks: list[Rank] = field(default_factory=list)
    exit_status: int | None = None  # of the launcher; None if it had to be ended
    output: str = ""

    @property
    def seconds(self) -> float:
        """From the fault to the end of the last rank, or of the last that was not at fault."""
        spared = SCENARIOS[self.scenario].spared and len(self.ranks) > 1
        ended = [r for i, r in enumerate(self.ranks) if r.how in ("ok", "error")
                 and not (spared and i == 1)]  # fmt: skip
        return max((r.seconds for r in ended), default=0.0)

    @property
    def seen(self) -> str:
        """The first line of what tells the user about the fault."""
        pattern = SCENARIOS[self.scenario].says
        errors = [r.says.partition("\n")[0] for r in self.ranks if r.how == "error"]
        # What a launcher says may go over lines.
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n-*\n|\n(?=multibn:)", self.output)]
        fitting = [t for t in [*errors, *paragraphs] if pattern and re.search(pattern, t)]
        return next(iter([*fitting, *errors]), "")

    def complaint(self, slack: float = 0.0) -> str:
        """What is not as it should be; "" if all is. It may take `slack` seconds more."""
        chosen = SCENARIOS[self.scenario]
        for rank, found in enumerate(self.ranks):
            if found.how not in ("ok", "error", "ended", "is stopped"):
                return f"rank {rank} {found.how}"
        if not chosen.says:
            return self._harm()
        if not re.search(chosen.says, self.seen):
            return f"the message does not match {chosen.says!r}"
        bystanders = [r for r in range(len(self.ranks)) if not (chosen.spared and r == 1)]
        fine = [r for r in bystanders if self.ranks[r].how == "ok"]
        if fine:
            return f"rank(s) {fine} saw no error"
        if self.seconds_of(bystanders) > chosen.seconds + slack:
            return f"took {self.seconds_of(bystanders):.2f} s"
        if chosen.ends and not all(self.ranks[r].ended for r in bystanders):
            return "the processes have not ended"
        if chosen.ends and self.exit_status == 0:
            return "exit status 0"
        return ""

    def today(self) -> str:
        """What it is to a peer's user: hangs, aborts, wrong numbers, or an error."""
        rank_1_is_lost = SCENARIOS[self.scenario].ends
        others = [r for i, r in enumerate(self.ranks) if not (rank_1_is_lost and i == 1)]
        signals = sorted({r.how for r in self.ranks if r.how.startswith("SIG")})
        if any(r.how == "hangs" for r in others):
            return " and ".join(["hangs", *signals])
        if signals:
            return ", ".join(signals)
        if any(r.how == "error" for r in others):
            return "error"
        if all(r.how == "ended" for r in others):
            return {"gloo": "ended by torchrun", "mpi": "ended by MPI"}[self.over]
        fine = all(r.off < 1e-4 for r in others) and len({r.digest for r in others}) == 1
        return "as it should be" if fine else "silent wrong numbers"

    def seconds_of(self, ranks: Sequence[int]) -> float:
        return max(self.ranks[r].seconds for r in ranks)

    def _harm(self) -> str:
        for rank, found in enumerate(self.ranks):
            if found.how != "ok":
                return f"rank {rank}: {found.how} {found.says}"
            if not found.off <= 1e-12:
                return f"rank {rank} is off by {found.off:.1g}"
        if len({r.digest for r in self.ranks}) > 1:
            return "the ranks' statistics differ"
        if SCENARIOS[self.scenario].ends and self.exit_status != 0:
            return f"exit status {self.exit_status}"
        return ""


@dataclass
class Job:
    """Scenarios that share a launch, for as long as it lives."""

    library: str
    over: str
    framework: str
    scenarios: list[str]
    size: ClassVar[int] = 3

    @property
    def launcher(self) -> str:
        return LAUNCHERS[self.over]

    def run(self) -> Iterator[Outcome]:
        """What became of each scenario; launches again after one that ends the ranks."""
        left = list(self.scenarios)
        with tempfile.TemporaryDirectory() as files:
            self._launch_earlier(files)
            while left:
                found = self._launch(left, files)
                yield from found
                left = left[len(found) :]

    def _launch_earlier(self, files: str) -> None:
        """The launches that have to be over when the scenarios begin."""
        before = [SCENARIOS[n] for n in self.scenarios if SCENARIOS[n].earlier]
        for size in sorted({s.earlier_size for s in before}):
            names = [s.name for s in before if s.earlier_size == size]
            with tempfile.TemporaryDirectory() as name:
                output = Path(name, "output")
                arguments = self._arguments(names, name, files, earlier=True)
                with _started(self._launched(arguments, size), output, {}) as process:
                    status = process.wait(_START)
                # What a peer has not left behind, it will not find.
                if status != 0 and self.library == "multibn":
                    raise RuntimeError(f"{self}: {names} on {size} ranks\n{output.read_text()}")

    def _launch(self, names: list[str], files: str) -> list[Outcome]:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            deadline = {"MULTIBN_TIMEOUT": f"{SCENARIOS[names[0]].deadline:g}"}
            command = self._launched(self._arguments(names, name, files), self.size)
            if SCENARIOS[names[0]].plain:
                at = command.index("mpi4py")
                del command[at - 1 : at + 1]
            with _started(command, directory / "output", deadline) as process:
                reached = self._wait(process, directory, names)
                status = process.poll()
                states = [_state(pid) for pid in _pids(directory)]
            text = (directory / "output").read_text(errors="replace")
            if len(states) < self.size:
                raise RuntimeError(f"{self}: the ranks did not start.\n{text[-4000:]}")
            found = [self._outcome(n, directory, states) for n in names[: reached + 1]]
            last = found[-1]
            last.output, last.exit_status = text, status
            return found

    def _arguments(
        self, names: list[str], directory: str, files: str, *, earlier: bool = False
    ) -> list[str]:
        spec = {"library": self.library, "over": self.over, "framework": self.framework,
                "scenarios": names, "files": files, "earlier": earlier}  # fmt: skip
        return ["-m", "faults.worker", json.dumps(spec), directory]

    def _launched(self, arguments: list[str], size: int) -> list[str]:
        return launch_command(self.launcher, size, arguments)

    def _wait(self, process: subprocess.Popen[str], directory: Path, names: list[str]) -> int:
        """Wait for the end of the launch, or until time is up; how many scenarios are behind."""
        behind = 0
        limit = time.monotonic() + _START
        while time.monotonic() < limit:
            chosen = SCENARIOS[names[behind]]
            gone = process.poll() is not None
            states = {pid: _state(pid) for pid in _pids(directory)}
            living = [pid for pid, state in states.items() if state]
            if gone and not living:
                break
            if all(states[pid] == "T" for pid in living):
                # The others have ended. torchrun would give stopped ranks 30 s more to do so.
                for pid in living:
                    _kill(pid)
            if behind < len(names) - 1 and self._is_done(directory, chosen.name):
                behind += 1
                limit = time.monotonic() + _START
                continue
            events = [_events(directory, rank, chosen.name) for rank in range(self.size)]
            marks = [e["fault"]["at"] for e in events if "fault" in e]
            if self.library == "multibn":
                patience = chosen.seconds + _END
            else:
                patience = _TODAY_ENDS if chosen.ends else _TODAY
            limit = min([limit, *(mark + patience for mark in marks)])
            time.sleep(0.02)
        return behind

    def _is_done(self, directory: Path, name: str) -> bool:
        return all((directory / f"{name}.{rank}.done").exists() for rank in range(self.size))

    def _outcome(self, name: str, directory: Path, states: list[str]) -> Outcome:
        events = [_events(directory, rank, name) for rank in range(self.size)]
        # Nothing can be found out before the last rank has come there.
        start = max((e["fault"]["at"] for e in events if "fault" in e), default=0.0)
        ranks = [
            replace(_became(directory, rank, found, start, state), ended=not state)
            for rank, (found, state) in enumerate(zip(events, states, strict=True))
        ]
        return Outcome(name, self.library, self.over, self.framework, ranks)


def _became(
    directory: Path, rank: int, events: Mapping[str, Any], start: float, state: str
) -> Rank:
    if "end" in events:
        seconds = events["end"]["at"] - start
        if "error" in events["end"]:
            return Rank("error", events["end"]["error"], seconds)
        numbers = events.get("numbers", {"off": 0.0, "digest": ""})
        return Rank("ok", "", seconds, numbers["off"], numbers["digest"])
    crash = Path(directory, f"{rank}.crash")
    dump = crash.read_text() if crash.exists() else ""
    for words, name in {"Aborted": "SIGABRT", "Segmentation": "SIGSEGV", "Bus": "SIGBUS"}.items():
        if f"Fatal Python error: {words}" in dump:
            return Rank(name)
    return Rank({"": "ended", "T": "is stopped"}.get(state, "hangs"))


@contextlib.contextmanager
def _started(
    command: list[str], output: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A launcher, ended with its ranks however the block is left."""
    with (
        output.open("w") as file,
        started(command, output=file, variables=variables) as process,
    ):
        try:
            yield process
        finally:
            # By their numbers: they may be stopped, or orphans, and take no signal from a launcher.
            for pid in _pids(output.parent):
                _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _pids(directory: Path) -> list[int]:
    return [
        json.loads(path.read_text().partition("\n")[0])["pid"]
        for path in sorted(directory.glob("*.jsonl"))
        if "\n" in path.read_text()
    ]


def _state(pid: int) -> str:
    """The letter that Linux has for the state of a process; "" if it has ended."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


def _events(directory: Path, rank: int, name: str) -> dict[str, Any]:
    """What a rank has written of a scenario, by event."""
    path = directory / f"{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {e["event"]: e for e in events if e["scenario"] == name}
