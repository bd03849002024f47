"""Data, networks and loops that the studies share."""

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.worker import Measured
from multibn import Communicator

# A study normalizes by the batch of a rank, of its parts or of all ranks: this is the rank's part.
RANK_BATCH = 128
NUM_TRAIN, NUM_TEST = 4096, 1792  # multiples of the batches of two ranks
WIDTH = 24  # channels


def measure(communicator: Communicator, study: str, seeds: int) -> Measured:
    """Notes: the rows of a study on this rank, each with its seed."""
    # torch 2.13 offers no other way to leave the buffers alone, at the start as in each step.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    module = import_module(f"evidence.{study}")
    rows = [{"seed": seed, **row} for seed in range(seeds) for row in module.measure(seed)]
    return {}, {"rows": rows}


def mnist1d() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test data of MNIST-1D (Greydanus, 2020, arXiv:2011.14439).

    Sequences `(N, 1, 40)` and labels `(N,)`; the package makes them, without a download.
    """
    # Here, so that the committed results can be drawn without the package.
    from mnist1d.data import get_dataset_args, make_dataset

    arguments = get_dataset_args()
    arguments.num_samples, arguments.train_split = 5900, 1.0
    state = np.random.get_state()  # noqa: NPY002 - the package seeds NumPy's global generator
    data = make_dataset(arguments)
    np.random.set_state(state)  # noqa: NPY002
    x = torch.from_numpy(data["x"]).float()[:, None]
    y = torch.from_numpy(data["y"])
    end = NUM_TRAIN + NUM_TEST
    return (x[:NUM_TRAIN], y[:NUM_TRAIN]), (x[NUM_TRAIN:end], y[NUM_TRAIN:end])


def network(seed: int, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    """Four convolutions with batch norm, for sequences of 40 numbers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for channels, stride in ((1, 1), (WIDTH, 2), (WIDTH, 2), (WIDTH, 2)):
        convolution = nn.Conv1d(channels, WIDTH, 5, stride, padding=2, bias=False)
        layers += [convolution, norm(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * WIDTH, 10))


def batches(num: int, size: int, num_steps: int, seed: int) -> Iterator[Tensor]:
    """The indices of each step's batch of `size` of `num` samples, in a new order each epoch."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(num_steps):
        if len(order) < size:
            order = torch.randperm(num, generator=generator)
        yield order[:size]
        order = order[size:]


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One step of training."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(model: nn.Module, x: Tensor, y: Tensor, part: slice, num_steps: int, seed: int) -> None:
    """Train on the rank's `part` of each batch."""
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer, schedule = optimizer_for(parallel, 0.2, num_steps)
    for index in batches(len(x), dist.get_world_size() * RANK_BATCH, num_steps, seed):
        step(parallel, optimizer, x[index[part]], y[index[part]])
        schedule.step()


def optimizer_for(
    model: nn.Module, rate: float, num_steps: int, warm_up: int = 10
) -> tuple[torch.optim.Optimizer, Any]:
    """SGD with momentum, and its schedule: a linear start, then half a cosine."""
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    start = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm_up)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps - warm_up)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [start, cosine], [warm_up])


def error(model: nn.Module, x: Tensor, y: Tensor, size: int | None = None) -> float:
    """Percentage of wrong answers in the model's present mode, over batches of `size`."""
    size = size or len(x)
    with torch.no_grad():
        wrong = [
            (model(x[i : i + size]).argmax(1) != y[i : i + size]).sum()
            for i in range(0, len(x), size)
        ]
    return 100 * int(torch.stack(wrong).sum()) / len(x)
