"""One launch of the parity command."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multibn._launch import Written, run_workers


@dataclass(frozen=True)
class Job:
    """What one launch runs.

    Attributes
    ----------
    launcher
        `"torchrun"`, `"mpiexec"`, or `""` for a process of its own.
    size
        Number of ranks.
    communicators, surfaces
        Each surface is trained over each communicator.
    cases
        Names of cases.
    model
        `module:function` of a user's pair of models, which takes the place of surfaces and cases.
    risky
        Whether workers that fail are a result.
    """

    launcher: str
    size: int
    communicators: Sequence[str]
    surfaces: Sequence[str] = ()
    cases: Sequence[str] = ()
    model: str = ""
    risky: bool = False

    @property
    def name(self) -> str:
        """For people."""
        ranks = f"{self.size} rank{'s' * (self.size > 1)}"
        return f"{self.launcher or 'no launcher'}, {ranks}: {', '.join(self.surfaces)}{self.model}"

    def run(self, *, timeout: float) -> list[Written]:
        """What each rank wrote. Raises WorkerError after `timeout` seconds, or if workers fail."""
        worker = ["-m", "multibn.parity.worker", json.dumps(asdict(self))]
        return run_workers(self.name, self.launcher, self.size, worker, timeout=timeout)
