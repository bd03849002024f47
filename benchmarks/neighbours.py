"""The layers beside batch norm, and flax's batch norm, each beside its peer in one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layer import OURS
from benchmarks.worker import Measured
from multibn import Communicator
from multibn.check.timing import Seconds, Step, take_turns, training_step
from multibn.torch_backend import RunningNorm, SyncGroupNorm


def measure(
    communicator: Communicator,
    observations: tuple[int, int],
    images: Sequence[int],
    flax: Sequence[Sequence[int]],
    seconds: float,
) -> Measured:
    """Times under "layer SHAPE/multibn" and "layer SHAPE/PEER"."""
    torch.manual_seed(0)
    pairs: dict[str, Mapping[str, Step]] = {
        _named("RunningNorm.update", observations): _running(observations, communicator),
        _named("SyncGroupNorm", images): _group(images, communicator),
        **{
            _named(f"flax.BatchNorm(sum_dtype={dtype})", shape): _flax(shape, dtype)
            for shape in flax
            for dtype in ("float64", "float32")
        },
    }
    times: dict[str, Seconds] = {}
    for label, steps in pairs.items():
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{label}/{name}": t for name, t in taken.items()}
    return times, {}


def _named(layer: str, shape: Sequence[int]) -> str:
    return f"{layer} {'x'.join(map(str, shape))}"


class Welford:
    """Running mean and variance by batches (Chan et al., 1979), in plain torch."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.mean, self.var = torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)
        self.count = 0

    def update(self, x: Tensor) -> None:
        x = x.to(self.mean.dtype)
        mean, var, count = x.mean(0), x.var(0, correction=0), len(x)
        shift, total = mean - self.mean, self.count + count
        self.mean = self.mean + shift * (count / total)
        squares = self.var * self.count + var * count + shift**2 * (self.count * count / total)
        self.var, self.count = squares / total, total


def _running(shape: tuple[int, int], communicator: Communicator) -> Mapping[str, Step]:
    x = torch.randn(*shape)
    norm = RunningNorm(shape[1], process_group=communicator)
    peers = {name: Welford(shape[1], getattr(torch, name)) for name in ("float64", "float32")}
    return {
        OURS: lambda: norm.update(x),
        **{f"Welford, {name}": lambda peer=peer: peer.update(x) for name, peer in peers.items()},  # type: ignore[misc]
    }


def _group(shape: Sequence[int], communicator: Communicator) -> Mapping[str, Step]:
    x, dy = torch.randn(*shape).requires_grad_(), torch.randn(*shape)
    sizes = min(32, shape[1] // 2), shape[1]
    layers = {
        OURS: SyncGroupNorm(*sizes, process_group=communicator),
        "nn.GroupNorm": nn.GroupNorm(*sizes),
    }
    return {name: training_step(layer, x, dy) for name, layer in layers.items()}


def _flax(shape: Sequence[int], sum_dtype: str) -> Mapping[str, Step]:
    import jax
    from flax import nnx

    from multibn.flax import BatchNorm

    x, dy = (jax.random.normal(jax.random.key(seed), shape) for seed in (0, 1))

    def step(layer: Any) -> Step:
        @jax.jit
        def run(state: Any, x: Any) -> Any:
            def loss(state: Any, x: Any) -> Any:
                model = nnx.merge(graph, state)
                return (model(x) * dy).sum(), nnx.state(model)

            return jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(state, x)

        graph, state = nnx.split(layer)
        return lambda: jax.block_until_ready(run(state, x))

    ours = BatchNorm(shape[-1], sum_dtype=sum_dtype, rngs=nnx.Rngs(0))
    flax = nnx.BatchNorm(shape[-1], use_fast_variance=False, rngs=nnx.Rngs(0))
    return {OURS: step(ours), "flax, use_fast_variance=False": step(flax)}
