"""Forward and backward of one layer, float32, beside its peers on the same batch per rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.worker import Measured
from multibn import Communicator, kernels
from multibn.check.timing import Seconds, Step, take_turns, training_step

SHAPES = [
    (32, 64, 56, 56),
    (32, 256, 28, 28),
    (8, 256, 56, 56),
    (32, 2048, 7, 7),
    (4, 64, 56, 56),
    (2, 64, 16, 56, 56),
    (256, 1024),
]
OURS, LOCAL, NAIVE, COPIES, CHAINERMN = "multibn", "nn.BatchNorm", "naive", "copies", "ChainerMN"
NUM_COPIES = 8


def layouts(shape: Sequence[int]) -> list[str]:
    return ["NCHW", "channels_last"] if len(shape) > 2 else ["NC"]


def memory_format(layout: str, num_dimensions: int) -> Any:
    """torch's memory format of a layout."""
    import torch

    if layout != "channels_last":
        return torch.contiguous_format
    return torch.channels_last if num_dimensions == 4 else torch.channels_last_3d


def beside(name: str) -> str:
    """The name of our layer's times when it took turns with the peer `name`."""
    return f"{OURS} beside {name}"


def in_pairs(
    steps: Mapping[str, Step], communicator: Communicator, *, seconds: float
) -> dict[str, Seconds]:
    """Times of each peer, and of our layer `beside` the peer; about `seconds` in all. Collective.

    Peers do not take turns with each other: temporary arrays of one peer can empty the caches, and
    would make the next peer's step slower.
    """
    times: dict[str, Seconds] = {}
    peers = [name for name in steps if name != OURS]
    for name in peers:
        pair = {OURS: steps[OURS], name: steps[name]}
        taken = take_turns(pair, communicator, seconds=seconds / len(peers))
        times |= {name: taken[name], beside(name): taken[OURS]}
    return times


def key(shape: Sequence[int], variant: str, name: str) -> str:
    return f"{'x'.join(map(str, shape))}/{variant}/{name}"


def measure_torch(
    communicator: Communicator,
    shapes: Sequence[Sequence[int]],
    seconds: float,
    relu: bool = False,
) -> Measured:
    """Times under `key(shape, layout, name)`; about `seconds` for each shape and layout.

    With `relu`, of a layer and a ReLU: fuse_relu=True beside nn.BatchNorm and an inplace nn.ReLU.
    """
    import torch

    times: dict[str, Seconds] = {}
    for shape in shapes:
        for layout in layouts(shape):
            torch.manual_seed(communicator.rank)
            steps = _torch_steps(shape, layout, communicator, relu)
            taken = in_pairs(steps, communicator, seconds=seconds)
            times |= {key(shape, layout, name): t for name, t in taken.items()}
    return times, {"kernels": kernels.select(torch.zeros(1)).__name__}


def _torch_steps(
    shape: Sequence[int], layout: str, communicator: Communicator, relu: bool
) -> Mapping[str, Step]:
    import torch
    from torch import nn

    from benchmarks.peers import NaiveFormula
    from multibn.torch_backend import SyncBatchNorm

    form = memory_format(layout, len(shape))
    x = torch.randn(*shape).to(memory_format=form).requires_grad_()
    dy = torch.randn(*shape).to(memory_format=form)
    local = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    copy = torch.empty_like(x)

    def copies() -> None:
        for _ in range(NUM_COPIES):
            copy.copy_(dy)

    layers: dict[str, nn.Module] = {
        OURS: SyncBatchNorm(shape[1], process_group=communicator, fuse_relu=relu),
        LOCAL: nn.Sequential(local(shape[1]), nn.ReLU(inplace=True)) if relu else local(shape[1]),
        NAIVE: NaiveFormula(shape[1], communicator),
    }
    steps = {name: training_step(layer, x, dy) for name, layer in layers.items()}
    if relu:
        return {name: steps[name] for name in (OURS, LOCAL)}
    return {**steps, COPIES: copies}


def measure_chainer(communicator: Any, shapes: Sequence[Sequence[int]], seconds: float) -> Measured:
    """Do as `measure_torch` over ChainerMN's communicator, for an even and an uneven split."""
    times: dict[str, Seconds] = {}
    for shape in shapes:
        for split in ("even", "uneven"):
            local_shape = list(shape)
            if split == "uneven":  # rank 0 holds three quarters of the batch of two ranks
                half = shape[0] // 2
                local_shape[0] += half if communicator.rank == 0 else -half
            steps = _chainer_steps(local_shape, communicator)
            taken = in_pairs(steps, communicator, seconds=seconds)
            times |= {key(shape, split, name): t for name, t in taken.items()}
    return times, {"kernels": kernels.select(np.zeros(1)).__name__}


def _chainer_steps(shape: Sequence[int], communicator: Any) -> Mapping[str, Step]:
    from multibn.chainer_backend import MultiNodeBatchNormalization  # before chainer

    # isort: split
    import chainer

    from benchmarks.peers import chainermn_link

    rng = np.random.default_rng(communicator.rank)
    x = chainer.Variable(rng.standard_normal(shape, np.float32))
    dy = rng.standard_normal(shape, np.float32)

    def step(link: Any) -> Step:
        def run() -> None:
            x.cleargrad()
            link.cleargrads()
            y = link(x)
            y.grad = dy
            y.backward()

        return run

    return {
        OURS: step(MultiNodeBatchNormalization(shape[1], communicator)),
        CHAINERMN: step(chainermn_link(shape[1], communicator.comm)),
    }
