"""Start ranks, wait for the outcome of their scenarios, and leave no process behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.outcome import Outcome, Rank
from faults.scenarios import DEADLINE, Scenario
from faults.setups import Setup
from multibn._platform import process_state
from multibn.parity.launch import environment, launch_command, run, started

_START, _END = 120.0, 6.0  # seconds in which ranks must start, and must end
# Seconds after the fault until a rank that has not ended is considered to wait forever. For peers:
# until it hangs; _PEER_ENDS if the launcher must end the ranks first.
_WAITS = DEADLINE + 1.0
_PEER, _PEER_ENDS = 3.0, 6.0


@dataclass
class Job:
    """Scenarios that share a launch until one of them ends the ranks."""

    setup: Setup
    scenarios: list[Scenario]
    size: int = 3

    def run(self) -> Iterator[Outcome]:
        """Yield the outcome of each scenario; launch again after a scenario that ends the ranks."""
        left = list(self.scenarios)
        with tempfile.TemporaryDirectory() as files:
            self._launch_earlier(files)
            while left:
                outcomes = self._launch(left, files)
                yield from outcomes
                left = left[len(outcomes) :]

    def _launch_earlier(self, files: str) -> None:
        """Run the launches that must be finished before the scenarios start."""
        before = [s for s in self.scenarios if s.earlier]
        for size in sorted({s.earlier_size for s in before}):
            chosen = [s for s in before if s.earlier_size == size]
            command = self._launched(self._arguments(chosen, "", files, earlier=True), size)
            ran = run(command, timeout=_START, variables=self.setup.variables)
            # If a peer fails here, the files are missing, and the scenario itself ends in an error.
            if ran.returncode and not self.setup.is_peer:
                raise RuntimeError(f"{self}: {chosen} on {size} ranks\n{ran.stdout}")

    def _launch(self, left: list[Scenario], files: str) -> list[Outcome]:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            command = self._launched(self._arguments(left, name, files), self.size)
            if left[0].without_mpi4py:
                at = command.index("mpi4py")
                del command[at - 1 : at + 1]
            variables = {"MULTIBN_TIMEOUT": f"{left[0].deadline:g}", **self.setup.variables}
            variables |= left[0].variables
            # By default, torchrun polls every 0.1 s and kills all ranks once one has ended, perhaps
            # before the others have printed their errors. An interval of 1 s gives them time.
            variables["PET_MONITOR_INTERVAL"] = "1"
            with _started(command, directory / "output", variables) as process:
                reached = self._wait(process, directory, left)
                status = process.poll()
                states = [process_state(pid) for pid in _pids(directory)]
            text = (directory / "output").read_text(errors="replace")
            if len(states) < self.size:
                raise RuntimeError(f"{self}: the ranks did not start.\n{text[-4000:]}")
            outcomes = [
                Outcome(chosen, self.setup, _ranks(chosen.name, directory, states))
                for chosen in left[: reached + 1]
            ]
            outcomes[-1].output, outcomes[-1].exit_status = text, status
            return outcomes

    def _arguments(
        self, chosen: list[Scenario], directory: str, files: str, *, earlier: bool = False
    ) -> list[str]:
        names = [s.name for s in chosen]
        spec = {"setup": self.setup.name, "scenarios": names, "files": files, "earlier": earlier}
        return ["-m", "faults.worker", json.dumps(spec), directory]

    def _launched(self, arguments: list[str], size: int) -> list[str]:
        command = launch_command(self.setup.launcher, size, arguments)
        # Ranks that wait for ever must not outlive this process, however it ends.
        return ["setpriv", "--pdeathsig", "TERM", *command] if shutil.which("setpriv") else command

    def _wait(self, process: subprocess.Popen[str], directory: Path, left: list[Scenario]) -> int:
        """Wait until the launch ends or time is up; return the number of finished scenarios."""
        finished = 0
        limit = time.monotonic() + _START
        while time.monotonic() < limit:
            chosen = left[finished]
            gone = process.poll() is not None
            states = {pid: process_state(pid) for pid in _pids(directory)}
            living = [pid for pid, state in states.items() if state]
            if gone and not living:
                break
            if all(states[pid] == "T" for pid in living):
                # All other ranks have ended. torchrun would wait 30 s for the stopped ones.
                for pid in living:
                    _kill(pid)
            done = [(directory / f"{r}.{chosen.name}.done").exists() for r in range(self.size)]
            if finished < len(left) - 1 and all(done):
                finished += 1
                limit = time.monotonic() + _START
                continue
            events = [_events(directory, rank, chosen.name) for rank in range(self.size)]
            marks = [e["fault"]["at"] for e in events if "fault" in e]
            limit = min([limit, *(mark + self._patience(chosen) for mark in marks)])
            time.sleep(0.02)
        return finished

    def _patience(self, chosen: Scenario) -> float:
        """Return how many seconds after the fault the ranks may take to end."""
        if self.setup.is_peer:
            return _PEER_ENDS if chosen.ends_in(self.setup) else _PEER
        return _WAITS if chosen.waits_in(self.setup) else chosen.seconds + _END


def _ranks(name: str, directory: Path, states: list[str]) -> list[Rank]:
    """Return the result of each rank in a scenario."""
    every = [_events(directory, rank, name) for rank in range(len(states))]
    # No rank can detect the fault before the last rank has reached it.
    start = max((e["fault"]["at"] for e in every if "fault" in e), default=0.0)
    ranks = []
    for rank, (events, state) in enumerate(zip(every, states, strict=True)):
        became = _became(directory / f"{rank}.crash", events, start, state)
        became.ended = not state
        printed = directory / f"{rank}.printed"
        if "fault" in events and printed.exists():  # includes lines of later scenarios
            since = printed.read_bytes()[events["fault"]["printed"] :]
            became.printed = since.decode(errors="replace").splitlines()
        ranks.append(became)
    return ranks


def _became(crash: Path, events: Mapping[str, Any], start: float, state: str) -> Rank:
    if "end" in events:
        seconds = events["end"]["at"] - start
        if "error" in events["end"]:
            return Rank("error", events["end"]["error"], seconds)
        numbers = events.get("numbers", {"off": 0.0, "digest": ""})
        return Rank("ok", "", seconds, numbers["off"], numbers["digest"])
    dump = crash.read_text() if crash.exists() else ""
    for words, name in {"Aborted": "SIGABRT", "Segmentation": "SIGSEGV", "Bus": "SIGBUS"}.items():
        if f"Fatal Python error: {words}" in dump:
            return Rank(name)
    return Rank({"": "ended", "T": "is stopped"}.get(state, "hangs"))


@contextlib.contextmanager
def _started(
    command: list[str], output: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher, and end the launcher and its ranks when the block is left."""
    with (
        output.open("w") as file,
        started(command, output=file, variables=environment() | dict(variables)) as process,
    ):
        try:
            yield process
        finally:
            # By pid: stopped or orphaned ranks get no signal from a launcher.
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


def _events(directory: Path, rank: int, name: str) -> dict[str, Any]:
    """Return the lines that a rank has written in a scenario, by event."""
    path = directory / f"{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {e["event"]: e for e in events if e["scenario"] == name}
