"""One scenario on one rank: the steps it takes, and what they should have come to."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from faults.models import CHANNELS, batch

SAMPLES = 4  # of each rank in a step


class Trial:
    """One scenario on one rank."""

    def __init__(self, world: Any, communicator: Any, mark: Callable[[], None]) -> None:
        self.rank, self.size = world.rank, world.size
        self.at_fault = self.rank == 1
        self.communicator, self.everybody = communicator, world.everybody
        self.files = world.files
        self.mark = mark
        self._world = world
        self.build()

    def build(self, channels: int = CHANNELS, communicator: Any = None) -> None:
        world, over = self._world, communicator or self.communicator
        self.trainee = world.trainee(world.trainee.make(world.make_norm, over, channels))
        self._taken: list[Sequence[int]] = []
        self._gradient = np.zeros(0)

    def warm_up(self) -> None:
        """Compile what will be needed."""
        for single in (False, True):
            alone = self._world.trainee(
                self._world.trainee.make(self._world.make_norm, self._world.alone, CHANNELS)
            )
            if single:
                alone.single_precision()
            alone.network.recomputes = single
            alone.step(batch(0, 0, SAMPLES))

    def step(
        self, counts: Sequence[int] = (), *, spoil: float = 0.0, backward: bool = True
    ) -> None:
        """A training step; `counts` are the ranks' samples, `spoil` is added to one number."""
        counts = counts or [SAMPLES] * self.size
        x = batch(len(self._taken), self.rank, counts[self.rank])
        if spoil:
            x[-1, -1] += spoil
        self._taken.append(counts)
        self._gradient = self.trainee.step(x, backward=backward)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def resume(self, number: int, size: int) -> None:
        """Go on with a network that has taken so many steps on `size` ranks."""
        self._taken = [[SAMPLES] * size] * number

    def error(self) -> float:
        """Largest difference of statistics and gradient from one process with all the samples."""
        world = self._world
        oracle = world.trainee(world.trainee.make(world.make_norm, world.alone, CHANNELS))
        gradient = np.zeros(0)
        for i, counts in enumerate(self._taken):
            gradient = oracle.step(np.concatenate([batch(i, r, n) for r, n in enumerate(counts)]))
        differences = [self.trainee.statistics() - oracle.statistics()]
        if self._taken:
            start = sum(self._taken[-1][: self.rank])
            mine = gradient[start : start + self._taken[-1][self.rank]]
            differences.append((self._gradient - mine).ravel())
        return float(np.abs(np.concatenate(differences)).max(initial=0.0))
