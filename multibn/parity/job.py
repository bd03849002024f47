"""One launch of the parity command."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multibn._launch import Written, run_workers


@dataclass(frozen=True)
class Job:
    """One launch of workers: each surface is trained over each communicator."""

    launcher: str  # a value of `LAUNCHERS`
    size: int  # number of ranks
    communicators: Sequence[str]
    surfaces: Sequence[str] = ()
    cases: Sequence[str] = ()  # their names
    model: str = ""  # a user's `module:function`, instead of surfaces and cases
    risky: bool = False  # a crash of the workers is a result

    @property
    def name(self) -> str:
        """Name for people."""
        ranks = f"{self.size} rank{'s' * (self.size > 1)}"
        return f"{self.launcher or 'no launcher'}, {ranks}: {', '.join(self.surfaces)}{self.model}"

    def run(self, *, timeout: float) -> list[Written]:
        """The ranks' results. Raises WorkerError after `timeout` seconds, or if workers fail."""
        worker = ["-m", "multibn.parity.worker", json.dumps(asdict(self))]
        return run_workers(self.name, self.launcher, self.size, worker, timeout=timeout)
