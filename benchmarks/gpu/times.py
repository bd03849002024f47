"""The parts that measure: each is a generator of rows of microseconds.

`python -m benchmarks.gpu.times PART FILE` appends the rows of a part to a file of JSON lines; as a
rank of torchrun, those of rank 0.

nn.SyncBatchNorm falls back to the local batch norm on one rank. So the peer calls the autograd
function of nn.SyncBatchNorm, as nn.SyncBatchNorm does on several ranks; and multibn's layer takes
the way of two equal ranks.
"""

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.command import LOCAL, NETWORK, OURS, PEER
from benchmarks.gpu.device import (
    DEVICE,
    STAND_INS,
    Equal,
    captured,
    gpu_microseconds,
    sized,
    synchronize,
)
from benchmarks.gpu.right import enter_nccl
from benchmarks.layer import memory_format
from multibn import Communicator, SingleProcess, wire
from multibn.check.network import BLOCKS, resnet50
from multibn.check.timing import Step, median_ms, message_steps, take_turns, training_step
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.kernels.triton import tiling
from multibn.parity.launch import leave_world
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm

Row = dict[str, Any]
# Sizes of ResNet-50, and sizes that fill a large GPU.
SHAPES: list[tuple[int, ...]] = sized(
    [(32, 2048, 7, 7), (32, 256, 14, 14), (32, 256, 28, 28), (256, 64, 56, 56),
     (128, 64, 112, 112)],
    [(2, 3, 4, 5)],
)  # fmt: skip
SWEPT = sized([(64, 256, 56, 56), (64, 512, 28, 28), (64, 256, 14, 14)], [(2, 3, 4, 5)])
SMALL = sized((8, 64, 28, 28), (2, 3, 4, 5))
SLOWER = sized((32, 256, 14, 14), (2, 3, 4, 5))  # than nn.SyncBatchNorm, in bfloat16 and NCHW
DTYPES = sized((torch.float32, torch.bfloat16), (torch.float32,))
FILLS = 50e6  # elements from which a size counts as one that fills the chip
CHAIN = sized(20, 2)
IMAGES = sized((64, 3, 224, 224), (2, 3, 32, 32))


class _AlwaysSynchronized(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        from torch.nn.modules._functions import SyncBatchNorm as Function

        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        y: Tensor = Function.apply(
            input, self.weight, self.bias, self.running_mean, self.running_var,
            self.eps, self.momentum, dist.group.WORLD, dist.get_world_size(),
        )  # fmt: skip
        return y


def compiled_layers() -> Iterator[Row]:
    """Time multibn's layer and nn.BatchNorm under torch.compile, as `layers` does."""
    return layers("a compiled layer's step on the GPU")


def layers(time: str = "a layer's step on the GPU") -> Iterator[Row]:
    """GPU time of one layer's step, without the host, beside eight passes at a copy's speed."""
    failed: list[str] = []
    for shape, dtype, layout in product(SHAPES, DTYPES, ("NCHW", "channels_last")):
        x, dy = _data(shape, dtype, layout)
        copy = torch.empty_like(dy)
        four = gpu_microseconds(partial(_copy_four_times, copy, dy))
        taken = {}
        for name, layer in _layers(shape[1]).items():
            if "compiled" in time and name != PEER:
                torch.compiler.reset()  # a class compiled eight times before would run as it is
                layer = _Model(layer)
                layer.compile(fullgraph=True, backend=sized("inductor", "eager"))
            try:
                taken[name] = gpu_microseconds(training_step(layer, x, dy))
            except RuntimeError as error:  # the other layers' times are worth as much
                taken[name] = math.nan
                failed.append(f"{name}, {tuple(shape)}: {error}")
            _free()
        yield _timed(time, shape, dtype, layout, {**taken, "eight passes": four})
        del x, dy, copy
        _free()
    if failed:
        raise RuntimeError(f"{len(failed)} not captured, first: {failed[0]}")


class _Model(nn.Module):
    """A layer of torch's own alone would not be compiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def host() -> Iterator[Row]:
    """Host time of a chain of small layers that never wait, for one layer's step."""
    calls: dict[str, Callable[[str], list[nn.Module]]] = {
        f"a chain of {CHAIN} layers": lambda name: [_layers(SMALL[1])[name] for _ in range(CHAIN)],
        f"one layer {CHAIN} times": lambda name: CHAIN * [_layers(SMALL[1])[name]],
    }
    for dtype, (what, called) in product(DTYPES, calls.items()):
        x, dy = _data(SMALL, dtype, "NCHW")
        steps = {name: training_step(nn.Sequential(*called(name)), x, dy) for name in _layers(1)}
        taken = _in_turns(steps)
        each = {name: t / CHAIN for name, t in taken.items()}
        yield _timed(f"host, {what}, for each layer's step", SMALL, dtype, "NCHW", each)


def sweep() -> Iterator[Row]:
    """GPU time of one layer's step with other programs, tiles and warps than the usual ones."""
    module: Any = tiling
    divide = tiling._tiling
    settings = sized(list(product((2, 4, 8, 12), (2048, 4096), (4, 8))), [(4, 2048, 4)])
    for shape, layout in product(SWEPT, ("NCHW", "channels_last")):
        x, dy = _data(shape, sized(torch.bfloat16, torch.float32), layout)
        for sums, tile, warps in settings:

            def with_warps(*about: Any, warps: int = warps) -> Any:
                tiles = divide(*about)
                return tiles._replace(constants=tiles.constants | {"num_warps": warps})

            module._SUMS, module._TILE, module._tiling = sums, tile, with_warps
            tiling.tilings_of.cache_clear()
            taken = gpu_microseconds(training_step(_layers(shape[1])[OURS], x, dy))
            what = f"{shape} {layout}: {sums} programs that sum, tiles of {tile}, {warps} warps"
            yield {"setting": what, "us": taken}
            _free()


def profile() -> Iterator[Row]:
    """What a layer called several times in a row launches and asks of the driver, by torch.

    At the size at which the layer is slower than the peer, and as the peer does there.
    """
    small = SMALL, DTYPES[0], "NCHW", OURS
    slower = product([SLOWER], DTYPES, ("NCHW", "channels_last"), (OURS, PEER))
    for shape, dtype, layout, name in (small, *slower):
        x, dy = _data(shape, dtype, layout)
        step = training_step(nn.Sequential(*CHAIN * [_layers(shape[1])[name]]), x, dy)
        for _ in range(3):
            step()
        synchronize()
        with torch.profiler.profile() as profiler:
            step()
            synchronize()
        for event in profiler.key_averages():
            taken = event.device_time_total or event.self_cpu_time_total
            what = f"{name} {shape} {dtype} {layout}, {event.count} times {event.key[:60]}"
            yield {"setting": f"profile: {what}", "us": taken}


def messages() -> Iterator[Row]:
    """Host time of a message: of the sum by the group alone, and of a layer's with all checks."""
    for C in sized((64, 2048), (3,)):
        numbers = torch.zeros(wire.length(C), dtype=torch.float64, device=DEVICE)
        sums = partial(_repeat, partial(TorchDistributed().allreduce_in_place, numbers))
        message = message_steps(_communicator(), C, repeat=CHAIN, on_gpu=not STAND_INS)["checked"]
        for what, us in _in_turns({"group.allreduce": sums, "a layer's message": message}).items():
            yield {"setting": f"host: {what} of {len(numbers)} numbers", "us": us / CHAIN}


def _repeat(step: Step) -> None:
    for _ in range(CHAIN):
        step()


def network() -> Iterator[Row]:
    """A training step of a network like ResNet-50, with autocast to bfloat16."""
    yield _network(NETWORK)


def captured_network() -> Iterator[Row]:
    """The same step, replayed from a CUDA graph."""
    yield _network(f"{NETWORK}, captured", capture=captured)


def compiled_network() -> Iterator[Row]:
    """The same step of compiled networks; the peer's runs as it is."""
    yield _compiled_network("default")


def compiled_network_in_graphs() -> Iterator[Row]:
    """The same step in CUDA graphs, which torch records in a process that no other mode shares."""
    yield _compiled_network("reduce-overhead")


def _compiled_network(mode: str) -> Row:
    options: Any = sized({"mode": mode}, {"backend": "eager"})
    return _network(f"{NETWORK}, torch.compile, {mode}", partial(torch.compile, **options))


def _network(
    what: str, make: Callable[..., Any] | None = None, capture: Callable[..., Any] = lambda f: f
) -> Row:
    """Times of a step; `make` makes of a model what is called, `capture` of a step what is run."""
    blocks = sized(BLOCKS, (1,))
    ours, peer, local = (resnet50(blocks) for _ in range(3))
    ours = convert_sync_batchnorm(ours, _communicator())
    if not STAND_INS:
        peer = nn.SyncBatchNorm.convert_sync_batchnorm(peer)
        for module in peer.modules():
            if type(module) is nn.SyncBatchNorm:
                module.__class__ = _AlwaysSynchronized
    models: dict[str, Any] = {OURS: ours, PEER: peer, LOCAL: local}
    x = torch.randn(*IMAGES, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(len(x), device=DEVICE)

    def step(model: nn.Module, call: Callable[..., Any]) -> None:
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not STAND_INS):
            loss = F.cross_entropy(call(x), labels)
        loss.backward()

    steps = {}
    for name, model in models.items():
        model.to(DEVICE, memory_format=torch.channels_last)
        call = model if make is None or name == PEER else make(model)
        steps[name] = capture(partial(step, model, call))
    taken = _in_turns(steps, finish=synchronize)
    _free()
    return _timed(what, IMAGES, "bfloat16 (autocast)", "channels_last", taken)


def _communicator() -> Communicator:
    """The ranks that there are, or what stands for two of them."""
    return Equal(TorchDistributed()) if dist.get_world_size() == 1 else TorchDistributed()


def _layers(num_channels: int) -> Mapping[str, nn.Module]:
    return {
        OURS: SyncBatchNorm(num_channels, process_group=_communicator()).to(DEVICE),
        # Its operators are CUDA's only.
        PEER: (nn.BatchNorm2d if STAND_INS else _AlwaysSynchronized)(num_channels, device=DEVICE),
        LOCAL: nn.BatchNorm2d(num_channels, device=DEVICE),
    }


def _data(shape: Sequence[int], dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    form = memory_format(layout, len(shape))
    x, dy = (
        torch.randn(*shape, device=DEVICE, dtype=dtype).contiguous(memory_format=form)
        for _ in range(2)
    )
    return x.requires_grad_(), dy


def _timed(
    time: str, shape: Sequence[int], dtype: Any, layout: str, taken: Mapping[str, float]
) -> Row:
    return {
        "time": time, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."),
        "layout": layout,
        "microseconds": taken, "fills": math.prod(shape) >= FILLS, "gpus": dist.get_world_size(),
    }  # fmt: skip


def _in_turns(steps: Mapping[str, Step], **options: Step) -> dict[str, float]:
    """Microseconds of each step, which begins when the GPU is done with the one before."""
    ranks = SingleProcess() if dist.get_world_size() == 1 else TorchDistributed()
    taken = take_turns(steps, ranks, seconds=sized(20.0, 0.0), wait=synchronize, **options)
    return {name: 1e3 * median_ms(times) for name, times in taken.items()}


def _copy_four_times(copy: Tensor, dy: Tensor) -> None:
    """Read and write as many bytes as eight passes."""
    for _ in range(4):
        copy.copy_(dy)


def _free() -> None:
    """Give back what graphs and large inputs have allocated."""
    gc.collect()
    if not STAND_INS:
        torch.cuda.empty_cache()


def main(name: str, path: str) -> None:
    parts = (network, captured_network, messages, layers, host, compiled_network,
             compiled_network_in_graphs, compiled_layers,
             profile, sweep)  # fmt: skip
    enter_nccl()
    with Path(path).open("a", buffering=1) as file:
        for row in {part.__name__: part for part in parts}[name]():
            if dist.get_rank() == 0:
                print(row, flush=True)
                file.write(json.dumps(row) + "\n")
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
