"""A layer's communicator in one phase, for messages of any length."""

from collections.abc import Callable
from typing import Any

import numpy as np

from multibn.communicators.layer_communicator import LayerCommunicator, LayerPhase


class Phase:
    """Sends each message by the `LayerPhase` of its length."""

    def __init__(
        self, communicator: Any, name: str, phase: str = "forward", dtype: str = "float32",
        **options: bool,
    ) -> None:  # fmt: skip
        self.layer = LayerCommunicator(communicator, lambda: name)
        self._key, self._options = (phase, np.dtype(dtype)), options

    def of(self, n: int, like: Any = None) -> LayerPhase:
        return self.layer.for_phase(*self._key, n, like=like)

    def allreduce(self, x: Any) -> Any:
        return self.of(x.shape[0], x).allreduce(x, **self._options)


def new_group(world: Any) -> Any:
    """A process group, or a communicator of MPI, of the same ranks."""
    if type(world).__name__ == "TorchDistributed":
        import torch.distributed as dist

        return dist.new_group()
    from mpi4py import MPI as mpi

    return mpi.COMM_WORLD.Dup()


def errors_of(size: int, work: Callable[[Any], object]) -> list[Exception]:
    """The error of each rank, a thread; all of them must raise, and none may wait for another."""
    from tests.helpers.ranks import run_ranks  # which imports pytest: programs have a Phase, too

    def run(world: Any) -> Exception:
        try:
            work(world)
        except Exception as error:
            return error
        raise AssertionError(f"no error on rank {world.rank}")

    return run_ranks(size, run)
