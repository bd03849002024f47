"""One scenario on one rank: training steps, and their errors against one process."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from faults.networks import batch
from faults.worlds import World

SAMPLES = 4  # per rank and step


class Trial:
    """One scenario on one rank."""

    _kind = "blocks"

    def __init__(self, world: World, communicator: Any, mark: Callable[[], None]) -> None:
        self.rank, self.size = world.rank, world.size
        self.at_fault = self.rank == 1
        self.communicator, self.everybody = communicator, world.everybody
        self.files = world.files
        self.mark = mark
        self._world = world

    def build(self, kind: str = "blocks", *, communicator: Any = None, **options: Any) -> None:
        """Make the model, by default over the communicator of the scenario."""
        self._kind = kind
        communicator = self.communicator if communicator is None else communicator
        self.trainee = self._world.build(communicator, kind, **options)
        self._taken: list[Sequence[int]] = []
        self._added = 0.0
        self._gradient = np.zeros(0)

    def begin(self) -> None:
        """Make the model and take two steps, after which the fault happens."""
        self.build()
        self.steps(2)
        self.mark()

    def warm_up(self, *, everything: bool) -> None:
        """Compile what a step calls; `everything` includes single precision and recomputation."""
        for single in (False, True)[: 1 + everything]:
            alone = self._world.build(self._world.alone, "blocks")
            if single:
                alone.single_precision()
            alone.network.recomputes = single
            alone.step(batch(0, 0, SAMPLES))

    def set_in_network(self, flag: str) -> None:
        setattr(self.trainee.network, flag, True)

    def set_in_block(self, flag: str) -> None:
        setattr(self.trainee.network.layer1[0], flag, True)

    def spoil(self, value: float) -> None:
        """Add a value to one number of this rank's next batches."""
        self._added = value

    def step(self, counts: Sequence[int] = (), *, backward: bool = True) -> None:
        """Run a training step; `counts` are the numbers of samples of the ranks."""
        counts = counts or [SAMPLES] * self.size
        x = batch(len(self._taken), self.rank, counts[self.rank])
        if len(x):
            x[-1, -1] += self._added
        self._taken.append(counts)
        self._gradient = self.trainee.step(x, backward=backward)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def resume(self, number: int, size: int) -> None:
        """Continue with a network that has taken `number` steps on `size` ranks."""
        self._taken = [[SAMPLES] * size] * number

    def error(self) -> float:
        """Return the largest error of statistics and gradient, compared with one process."""
        oracle = self._world.build(self._world.alone, self._kind)
        oracle.penalizes = getattr(self.trainee, "penalizes", False)
        gradient = np.zeros(0)
        for i, counts in enumerate(self._taken):
            gradient = oracle.step(np.concatenate([batch(i, r, n) for r, n in enumerate(counts)]))
        differences = [self.trainee.statistics() - oracle.statistics()]
        if self._taken:
            start = sum(self._taken[-1][: self.rank])
            mine = gradient[start : start + self._taken[-1][self.rank]]
            differences.append((self._gradient - mine).ravel())
        return float(np.abs(np.concatenate(differences)).max(initial=0.0))
