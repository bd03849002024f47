"""Ranks with torch over each transport, and the trainee that trains their networks."""

import contextlib
import functools
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import peers
from faults.networks import PATHS, Array
from faults.worlds import World
from multibn.torch_backend import check_sync, convert_sync_batchnorm


class Trainee:
    """Train a torch network step by step; `model` is the network, perhaps wrapped in DDP."""

    Module, Sequential = nn.Module, nn.Sequential
    average, check_sync = "running_mean", staticmethod(check_sync)
    children_of = staticmethod(contextlib.nullcontext)
    tanh = staticmethod(torch.tanh)
    concat = staticmethod(functools.partial(torch.cat, dim=1))
    recomputed = staticmethod(functools.partial(checkpoint, use_reentrant=False))

    @staticmethod
    def linear(num_in: int, num_out: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(num_in, num_out)

    @staticmethod
    def evaluation(norm: nn.Module, evaluates: bool) -> Any:
        norm.train(norm.training and not evaluates)
        return contextlib.nullcontext()

    @staticmethod
    def in_float64(network: nn.Module) -> nn.Module:
        return network.double()

    def __init__(self, model: Any) -> None:
        self.model = model
        self.network = getattr(model, "module", model)

    def step(self, x: Array, *, backward: bool = True) -> Array:
        """Run a forward and a backward pass; return the gradient of the input."""
        dtype = next(self.network.parameters()).dtype
        t = torch.tensor(x, dtype=dtype, requires_grad=True)
        if not backward:
            with torch.no_grad():
                self.model(t)
            return np.zeros_like(x)
        (self.model(t) ** 2).sum().backward()
        assert t.grad is not None
        return t.grad.numpy()

    def statistics(self) -> Array:
        """Return all running statistics as one vector."""
        buffers = self.network.state_dict().items()
        return np.concatenate([b.double().numpy().ravel() for k, b in buffers if "running_" in k])

    def norms(self) -> list[Any]:
        return [self.network.get_submodule(path) for path in PATHS]

    def set_norms(self, norms: list[Any]) -> None:
        for path, norm in zip(PATHS, norms, strict=True):
            self.network.set_submodule(path, norm)

    def save(self, path: Path) -> None:
        """Write the state, as a program would."""
        torch.save(self.network.state_dict(), path)

    def load(self, path: Path) -> None:
        self.network.load_state_dict(torch.load(path))

    def evaluate(self) -> None:
        """Switch the network to evaluation."""
        self.model.eval()

    def single_precision(self) -> None:
        self.network.float()


class _Torch(World):
    trainee = Trainee

    def norm(self, channels: int, communicator: Any) -> nn.Module:
        return nn.BatchNorm1d(channels)

    def synchronize(self, model: nn.Module, communicator: Any) -> Any:
        return convert_sync_batchnorm(model, communicator)


def _init_process_group() -> None:
    """Make the default process group, with a separate key prefix after a restart by torchrun.

    torchrun keeps one store for all attempts, so torch's group might read addresses of the previous
    attempt (pytorch#135712). multibn's keys have no such prefix.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        dist.init_process_group("gloo")
        return
    store, rank, size = next(dist.rendezvous("env://"))
    attempt_store = dist.PrefixStore(attempt, store)
    dist.init_process_group("gloo", store=attempt_store, rank=rank, world_size=size)
    dist.distributed_c10d._get_default_store = lambda: store


class Gloo(_Torch):
    def __init__(self, count: int) -> None:
        _init_process_group()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.everybody = dist.group.WORLD
        self._communicators = [self.everybody] * (count == 1) or [
            dist.new_group(list(range(self.size))) for _ in range(count)
        ]


class DataParallel(_Torch):
    """The recipe for torch in README.md, which passes no process group."""

    everybody = None

    def __init__(self, count: int) -> None:
        # DistributedDataParallel imports this in its constructor, while a fault's time is measured.
        import_module("torch._dynamo")
        _init_process_group()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()

    def communicator(self, number: int) -> None:
        """Return None, which means the default process group. Make a new group for each number."""
        if number:
            dist.destroy_process_group()
            store = dist.PrefixStore(f"default group {number}", self._store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def synchronize(self, model: nn.Module, communicator: Any) -> Any:
        if communicator is self.alone:
            return convert_sync_batchnorm(model, self.alone)
        return convert_sync_batchnorm(nn.parallel.DistributedDataParallel(model))


class Mpi(_Torch):
    def __init__(self, count: int) -> None:
        self._enter_mpi(count)


class OwnCommunicator:
    """A user-defined communicator: no deadline, no point-to-point messages."""

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


class _PlainTorch:
    """torch.distributed without multibn's checks."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = group.size()

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self._group)
        return x


class NaiveFormula(Gloo):
    """The formula of detectron2's NaiveSyncBatchNorm on torch.distributed."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._communicators = [_PlainTorch(group) for group in self._communicators]

    def norm(self, channels: int, communicator: Any) -> nn.Module:
        return peers.NaiveFormula(channels, communicator)

    def synchronize(self, model: nn.Module, communicator: Any) -> nn.Module:
        return model
