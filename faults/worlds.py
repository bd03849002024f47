"""What a rank trains over: multibn's layers, or those that are in use without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from faults import models


class World:
    """The ranks of this launch.

    Attributes
    ----------
    rank, size
        Of this process.
    trainee
        The framework.
    make_norm
        Makes a layer of so many channels over a communicator.
    communicators
        Different ones, of all ranks: a fault leaves the others usable.
    everybody
        What a program would name all ranks by: the default group, or MPI's world.
    alone
        A communicator of this process only.
    files
        A directory that later launches have too.
    """

    rank: int
    size: int
    trainee: Any
    make_norm: models.MakeNorm
    communicators: list[Any]
    everybody: Any
    alone: Any
    files: Path


def enter(library: str, over: str, framework: str, files: str, count: int) -> World:
    """Join the others; `count` communicators."""
    world = World()
    world.files = Path(files)
    world.trainee = models.Torch if framework == "torch" else models.Chainer
    if framework == "chainer":
        from multibn.chainer_backend import compat

        compat.make_importable()
        import chainer

        chainer.global_config.dtype = np.dtype(np.float64)
    {"gloo": _enter_gloo, "mpi": _enter_mpi}[over](world, count)
    if library == "multibn":
        from multibn import SingleProcess

        world.alone = SingleProcess()
        world.make_norm = _torch_layer if framework == "torch" else _chainer_link
    elif framework == "torch":
        from multibn import SingleProcess

        world.communicators = [_PlainTorch(group) for group in world.communicators]
        world.alone = SingleProcess()
        world.make_norm = _naive_layer
    else:
        import chainermn
        from mpi4py import MPI

        from benchmarks.peers import chainermn_link

        make: Callable[[Any], Any] = lambda c: chainermn.create_communicator("naive", c)  # noqa: E731
        world.trainee = models.ChainerMN
        world.communicators = [make(comm) for comm in world.communicators]
        world.alone = make(MPI.COMM_SELF)
        world.make_norm = chainermn_link
    return world


def _enter_gloo(world: World, count: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world.rank, world.size = dist.get_rank(), dist.get_world_size()
    world.everybody = dist.group.WORLD
    world.communicators = [world.everybody] * (count == 1) or [
        dist.new_group(list(range(world.size))) for _ in range(count)
    ]


def _enter_mpi(world: World, count: int) -> None:
    from mpi4py import MPI

    world.everybody = comm = MPI.COMM_WORLD
    world.rank, world.size = comm.rank, comm.size
    world.communicators = [comm] * (count == 1) or [comm.Dup() for _ in range(count)]


def _torch_layer(channels: int, communicator: Any) -> Any:
    from multibn.torch_backend import SyncBatchNorm

    return SyncBatchNorm(channels, process_group=communicator)


def _chainer_link(channels: int, communicator: Any) -> Any:
    from multibn.chainer_backend import MultiNodeBatchNormalization

    return MultiNodeBatchNormalization(channels, communicator)


def _naive_layer(channels: int, communicator: Any) -> Any:
    import torch

    from benchmarks.peers import NaiveFormula

    class Layer(NaiveFormula):
        def forward(self, x: Any) -> Any:
            if self.training:
                return super().forward(x)
            mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
            return (x - mean) * torch.rsqrt(var + 1e-5)

    return Layer(channels, communicator)


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
