"""The ranks of a launch in each setup, and layers over them as README's recipes make them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from faults.networks import make_network
from faults.setups import Setup
from multibn import SingleProcess


class World(ABC):
    """The ranks of this launch."""

    trainee: type[Any]  # takes steps with a network in this framework
    rank: int
    size: int
    everybody: Any  # what a program would name all ranks by: the default group, or MPI's world
    alone: Any = SingleProcess()
    files: Path  # a directory that later launches have too
    _communicators: Sequence[Any]

    def communicator(self, number: int) -> Any:
        """One of several, all of all ranks: a fault leaves the others usable. Collective."""
        return self._communicators[number]

    def build(self, communicator: Any, kind: str, **options: Any) -> Any:
        """A model over a communicator, and what takes steps with it."""
        of = self.trainee
        model = make_network(kind, lambda n: self.norm(n, communicator), of, **options)
        return of(self.synchronize(of.in_float64(model), communicator))

    @abstractmethod
    def norm(self, channels: int, communicator: Any) -> Any:
        """A batch norm as a program has it before it is synchronized."""

    def synchronize(self, model: Any, communicator: Any) -> Any:
        """The model with layers that share statistics."""
        return model

    def _enter_mpi(self, count: int) -> None:
        """Be a rank of MPI's world, with `count` communicators."""
        from mpi4py import MPI

        self.everybody = world = MPI.COMM_WORLD
        self.rank, self.size = world.rank, world.size
        self._communicators = [world] * (count == 1) or [world.Dup() for _ in range(count)]


def enter(setup: Setup, files: str, count: int) -> World:
    """Join the others, for `count` scenarios. Collective."""
    module = import_module(f"faults.{setup.framework}_worlds")
    world: World = getattr(module, setup.world)(count)
    world.files = Path(files)
    return world
