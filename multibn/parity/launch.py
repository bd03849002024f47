"""The launches of the parity command."""

import json
from dataclasses import asdict, dataclass

from multibn._launch import Written, run_workers


@dataclass(frozen=True)
class Job:
    """What one launch of workers runs: each surface is trained over each communicator."""

    launcher: str  # "torchrun", "mpiexec", or "" for a process of its own
    size: int  # number of ranks
    communicators: tuple[str, ...]
    surfaces: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()  # their names
    model: str = ""  # a user's `module:function`, in place of surfaces and cases
    risky: bool = False  # workers that fail are a result

    @property
    def name(self) -> str:
        """For people."""
        ranks = f"{self.size} rank{'s' * (self.size > 1)}"
        return f"{self.launcher or 'no launcher'}, {ranks}: {', '.join(self.surfaces)}{self.model}"

    def run(self, *, timeout: float) -> list[Written]:
        """What each rank wrote. Raises WorkerError after `timeout` seconds, or if workers fail."""
        worker = ["-m", "multibn.parity.worker", json.dumps(asdict(self))]
        return run_workers(self.name, self.launcher, self.size, worker, timeout=timeout)
