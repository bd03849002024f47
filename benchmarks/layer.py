"""Forward and backward of one layer, as a ratio to nn.BatchNorm2d on the same rank's batch.

    python benchmarks/layer.py
    mpiexec -n 2 python -m mpi4py benchmarks/layer.py --over mpi
    torchrun --nproc-per-node 2 benchmarks/layer.py --over gloo

Layers take turns, so that both see the same machine; times are medians, one thread a rank.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from multibn import Communicator, SingleProcess, as_communicator
from multibn.torch_backend import SyncBatchNorm

SHAPES = [(32, 64, 56, 56), (32, 256, 28, 28), (8, 256, 56, 56), (32, 2048, 7, 7), (4, 64, 56, 56)]


def step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return run


def seconds(function: Callable[[], None], communicator: Communicator) -> float:
    communicator.allreduce(torch.zeros(1))  # ranks start together
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    shape: tuple[int, ...], memory_format: torch.memory_format, communicator: Communicator, n: int
) -> tuple[float, float]:
    """Median seconds a step of the local layer and of the synchronized one."""
    x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
    dy = torch.randn(shape).to(memory_format=memory_format)
    local = step(nn.BatchNorm2d(shape[1]), x, dy)
    synchronized = step(SyncBatchNorm(shape[1], process_group=communicator), x, dy)
    local(), synchronized()
    times = [(seconds(local, communicator), seconds(synchronized, communicator)) for _ in range(n)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return medians[0], medians[1]


def join(over: str) -> Communicator:
    if over == "none":
        return SingleProcess()
    if over == "mpi":
        from mpi4py import MPI

        return as_communicator(MPI.COMM_WORLD)
    torch.distributed.init_process_group(over)
    return as_communicator(torch.distributed.group.WORLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--over", choices=["none", "mpi", "gloo"], default="none")
    parser.add_argument("--repeat", type=int, default=15, help="steps of each layer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    communicator = join(arguments.over)
    table = Table(title=f"{communicator.size} rank(s), {communicator}, torch {torch.__version__}")
    for column in ("shape", "layout", "nn.BatchNorm2d ms", "SyncBatchNorm ms", "ratio"):
        table.add_column(column, justify="right")
    layouts: dict[str, Any] = {
        "NCHW": torch.contiguous_format,
        "channels_last": torch.channels_last,
    }
    for shape in SHAPES:
        for name, memory_format in layouts.items():
            local, sync = compare(shape, memory_format, communicator, arguments.repeat)
            row = [f"{local * 1e3:.1f}", f"{sync * 1e3:.1f}", f"{sync / local:.2f}"]
            table.add_row(str(shape), name, *row)
    if communicator.rank == 0:
        Console().print(table)
    if arguments.over == "gloo":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
