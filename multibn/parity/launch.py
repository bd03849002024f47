"""The launches of the parity command."""

import json
from dataclasses import dataclass

from multibn._launch import Written, run_workers


@dataclass(frozen=True)
class Job:
    """What one launch of workers runs.

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
    communicators: tuple[str, ...]
    surfaces: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    model: str = ""
    risky: bool = False

    @property
    def name(self) -> str:
        """For people."""
        ranks = f"{self.size} rank{'s' * (self.size > 1)}"
        return f"{self.launcher or 'no launcher'}, {ranks}: {', '.join(self.surfaces)}{self.model}"

    @property
    def spec(self) -> str:
        """For the worker."""
        return json.dumps(
            {
                "communicators": self.communicators,
                "surfaces": self.surfaces,
                "cases": self.cases,
                "model": self.model,
            }
        )

    def run(self, *, timeout: float) -> list[Written]:
        """What each rank wrote. Raises WorkerError after `timeout` seconds, or if workers fail."""
        worker = ["-m", "multibn.parity.worker", self.spec]
        return run_workers(self.name, self.launcher, self.size, worker, timeout=timeout)
