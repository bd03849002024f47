"""The ranks of a launch in each setup, with models made by the recipes of README.md."""

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

    trainee: type[Any]  # trains a network in this framework
    rank: int
    size: int
    everybody: Any  # all ranks, as a program would pass them: the default group, or COMM_WORLD
    alone: Any = SingleProcess()
    files: Path  # a directory that later launches share
    _communicators: Sequence[Any]

    def communicator(self, number: int) -> Any:
        """Return communicator `number` of all ranks; each fault gets a new one. Collective."""
        return self._communicators[number]

    def build(self, communicator: Any, kind: str, **options: Any) -> Any:
        """Return a trainee with a model over a communicator."""
        trainee = self.trainee
        model = make_network(kind, lambda n: self.norm(n, communicator), trainee, **options)
        return trainee(self.synchronize(trainee.in_float64(model), communicator))

    @abstractmethod
    def norm(self, channels: int, communicator: Any) -> Any:
        """Return a batch norm layer, before `synchronize`."""

    def synchronize(self, model: Any, communicator: Any) -> Any:
        """Return the model, with layers that share statistics."""
        return model

    def _enter_mpi(self, count: int) -> None:
        """Join MPI.COMM_WORLD, and make `count` communicators of all ranks."""
        from mpi4py import MPI

        self.everybody = world = MPI.COMM_WORLD
        self.rank, self.size = world.rank, world.size
        self._communicators = [world] * (count == 1) or [world.Dup() for _ in range(count)]


def enter(setup: Setup, files: str, count: int) -> World:
    """Join the other ranks, for `count` scenarios. Collective."""
    module = import_module(f"faults.{setup.framework}_worlds")
    world: World = getattr(module, setup.world)(count)
    world.files = Path(files)
    return world
