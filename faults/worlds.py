"""The ranks of a launch in each setup, and layers over them as README's recipes make them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from faults import models
from faults.setups import Setup


class World(ABC):
    """The ranks of this launch.

    Attributes
    ----------
    rank, size
        Of this process.
    everybody
        What a program would name all ranks by: the default group, or MPI's world.
    alone
        A communicator of this process only.
    files
        A directory that later launches have too.
    """

    framework: type[Any]
    rank: int
    size: int
    everybody: Any
    alone: Any
    files: Path
    _communicators: Sequence[Any]

    def communicator(self, number: int) -> Any:
        """One of several, all of all ranks: a fault leaves the others usable. Collective."""
        return self._communicators[number]

    def build(self, communicator: Any, kind: str, **options: Any) -> Any:
        """A model over a communicator, and what takes steps with it."""
        model = self.framework.make(kind, lambda n: self.norm(n, communicator), **options)
        return self.framework(self.synchronize(model, communicator))

    @abstractmethod
    def norm(self, channels: int, communicator: Any) -> Any:
        """A batch norm as a program has it before it is synchronized."""

    def synchronize(self, model: Any, communicator: Any) -> Any:
        """The model with layers that share statistics."""
        return model


class _Torch(World):
    framework = models.Torch

    def __init__(self) -> None:
        from multibn import SingleProcess

        self.alone = SingleProcess()

    def norm(self, channels: int, communicator: Any) -> Any:
        from torch import nn

        return nn.BatchNorm1d(channels)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        from multibn.torch_backend import convert_sync_batchnorm

        return convert_sync_batchnorm(model, communicator)


class Gloo(_Torch):
    def __init__(self, count: int) -> None:
        import torch.distributed as dist

        super().__init__()
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.everybody = dist.group.WORLD
        self._communicators = [self.everybody] * (count == 1) or [
            dist.new_group(list(range(self.size))) for _ in range(count)
        ]


class DataParallel(_Torch):
    """README's recipe for torch, which names no process group."""

    everybody = None

    def __init__(self, count: int) -> None:
        import torch.distributed as dist

        # DistributedDataParallel imports this when it is built: within the time of a fault.
        import_module("torch._dynamo")
        super().__init__()
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()

    def communicator(self, number: int) -> None:
        """None, for the default process group; a new one for each number."""
        import torch.distributed as dist

        if number:
            dist.destroy_process_group()
            store = dist.PrefixStore(f"default group {number}", self._store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        import torch

        from multibn.torch_backend import convert_sync_batchnorm

        if communicator is self.alone:
            return convert_sync_batchnorm(model, self.alone)
        model = torch.nn.parallel.DistributedDataParallel(model)
        return convert_sync_batchnorm(model)


class Mpi(_Torch):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.rank, self.size, self.everybody, self._communicators = _enter_mpi(count)


class OwnCommunicator:
    """Ten lines that a user may write: no deadline, and nothing between two ranks but sums."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def allreduce(self, x: Any, /) -> Any:
        summed = np.empty_like(x)
        self.comm.Allreduce(x, summed)
        return summed

    def split(self, color: int, key: int = 0) -> "OwnCommunicator":
        return OwnCommunicator(self.comm.Split(color, key))


class Own(Mpi):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.everybody = OwnCommunicator(self.everybody)
        self._communicators = [OwnCommunicator(comm) for comm in self._communicators]


class ChainerMN(World):
    """README's recipe for Chainer."""

    framework = models.Chainer

    def __init__(self, count: int) -> None:
        from multibn import SingleProcess
        from multibn.chainer_backend import compat

        compat.make_importable()
        import chainer
        import chainermn

        chainer.global_config.dtype = np.dtype(np.float64)
        self.alone = SingleProcess()
        self.rank, self.size, comm, comms = _enter_mpi(count)
        self.everybody = chainermn.create_communicator("naive", comm)
        self._communicators = [chainermn.create_communicator("naive", c) for c in comms]

    def norm(self, channels: int, communicator: Any) -> Any:
        from chainer import links as L

        return L.BatchNormalization(channels)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        from multibn.chainer_backend import create_mnbn_model

        return create_mnbn_model(model, communicator)


class NaiveFormula(Gloo):
    """The formula of detectron2's NaiveSyncBatchNorm on torch.distributed."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._communicators = [_PlainTorch(group) for group in self._communicators]

    def norm(self, channels: int, communicator: Any) -> Any:
        from benchmarks import peers

        return peers.NaiveFormula(channels, communicator)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        return model


class ChainerMNLink(ChainerMN):
    """ChainerMN's own link."""

    framework = models.ChainerMNLink

    def __init__(self, count: int) -> None:
        super().__init__(count)
        import chainermn
        from mpi4py import MPI

        self.alone = chainermn.create_communicator("naive", MPI.COMM_SELF)

    def norm(self, channels: int, communicator: Any) -> Any:
        from benchmarks.peers import chainermn_link

        return chainermn_link(channels, communicator)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        return model


class _PlainTorch:
    """torch.distributed as it is."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = group.size()

    def allreduce(self, x: Any) -> Any:
        import torch.distributed as dist

        x = x.clone()
        dist.all_reduce(x, group=self._group)
        return x


def _enter_mpi(count: int) -> tuple[int, int, Any, list[Any]]:
    """This process's rank, the number of ranks, MPI's world, and `count` communicators."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    comms = [world] * (count == 1) or [world.Dup() for _ in range(count)]
    return world.rank, world.size, world, comms


_WORLDS: dict[str, Any] = {
    "shared memory": Gloo,
    "gloo": Gloo,
    "ddp": DataParallel,
    "mpi": Mpi,
    "chainermn": ChainerMN,
    "own": Own,
    "naive formula": NaiveFormula,
    "ChainerMN's link": ChainerMNLink,
}


def enter(setup: Setup, files: str, count: int) -> World:
    """Join the others, for `count` scenarios. Collective."""
    world: World = _WORLDS[setup.name](count)
    world.files = Path(files)
    return world
