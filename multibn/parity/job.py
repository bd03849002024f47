"""One launch of the parity command."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multibn._launch import LAUNCHERS, Written, run_workers


@dataclass(frozen=True)
class Job:
    """One launch of workers: each surface is trained over each communicator, of one launcher."""

    size: int  # number of ranks
    communicators: Sequence[str]
    surfaces: Sequence[str] = ()
    cases: Sequence[str] = ()  # their names
    model: str = ""  # a user's `module:function`, instead of surfaces and cases

    @property
    def name(self) -> str:
        """Name for people."""
        over = ", ".join(self.communicators)
        return f"{', '.join(self.surfaces)}{self.model} over {over}, ranks: {self.size}"

    def run(self, *, timeout: float) -> list[Written]:
        """The ranks' results. Raises WorkerError after `timeout` seconds, or if workers fail."""
        launcher = LAUNCHERS[self.communicators[0]]
        worker = ["-m", "multibn.parity.worker", json.dumps(asdict(self))]
        return run_workers(self.name, launcher, self.size, worker, timeout=timeout)
