"""Whether the numbers on the GPU are right: tests, a part of `python -m benchmarks.gpu` each.

`python -m benchmarks.gpu.right OVER` is one rank of `test_ranks`.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.device import (
    DEVICE,
    STAND_INS,
    Equal,
    captured,
    host_waits_are_errors,
    sized,
    synchronize,
    use_gpu_kernels,
)
from multibn import Communicator, SingleProcess, kernels
from multibn._platform import find_command, importable
from multibn.communicators.channel import flush_checks
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.parity.launch import enter_world, launch_command, leave_world, run
from multibn.parity.oracle import batch_norm, relative_error, running
from multibn.torch_backend import SyncBatchNorm

# Largest error, in units of the largest right value.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
IMAGES = sized((8, 64, 28, 28), (2, 3, 4, 5))
DTYPES = sized((torch.float32, torch.bfloat16), (torch.float32,))
SHAPES: Any = sized(
    [(32, 96, 14, 14), (8, 64, 56, 56), (5, 3, 9, 11), (256, 1000)], [(2, 3, 4, 5), (6, 4)]
)
CASES = [
    (dtype, shape, channels_last)
    for dtype, shape in product(sized(BOUNDS, DTYPES), SHAPES)
    for channels_last in [False, True][: 2 if len(shape) == 4 else 1]
    # Each shape and dtype compiles its kernels: 0.4 s a kernel.
    if dtype in (torch.float32, torch.bfloat16) or shape == SHAPES[0]
]
on_one_rank_and_as_on_two = pytest.mark.parametrize(
    "communicator", [SingleProcess(), Equal(SingleProcess())], ids=["1 rank", "2 ranks"]
)


class Data(NamedTuple):
    """One rank's input, and the gradient of its output; in host memory."""

    x: Tensor
    dy: Tensor


@on_one_rank_and_as_on_two
@pytest.mark.parametrize("dtype, shape, channels_last", CASES)
def test_numbers(
    dtype: torch.dtype, shape: Sequence[int], channels_last: bool, communicator: Communicator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A layer's step by Triton's kernels, in all dtypes and layouts."""
    use_gpu_kernels(monkeypatch)
    assert kernels.select(torch.zeros(1, device=DEVICE)).__name__ == "multibn.kernels.cuda"
    every = data(shape, dtype, 1, channels_last=channels_last) * communicator.size
    check_layer(_layer(shape[1], communicator, dtype), every)


@on_one_rank_and_as_on_two
def test_graphs(communicator: Communicator) -> None:
    """A captured step gives the numbers of a step that is not, also for a new input."""
    layer, eager = (_layer(IMAGES[1], communicator) for _ in range(2))
    (x, dy), (other, _) = (_on_device(d) for d in data(IMAGES, torch.float32, 2))
    y = torch.empty_like(x)

    def step() -> None:
        x.grad = None
        out = layer(x)
        y.copy_(out.detach())
        out.backward(dy)

    replay = captured(step)
    layer.load_state_dict(eager.state_dict())
    for value in (x.detach().clone(), other.detach()):
        with torch.no_grad():
            x.copy_(value)
        replay()
        right = value.clone().requires_grad_()
        expected = eager(right)
        expected.backward(dy)
        got = [y, x.grad, layer.running_mean, layer.running_var]
        wanted = [expected.detach(), right.grad, eager.running_mean, eager.running_var]
        assert all(map(torch.equal, got, wanted))
    if STAND_INS:
        return  # a step that is not captured raises where the input has NaN
    with torch.no_grad():
        x[0, 0] = torch.nan
    before = layer.running_mean.clone()
    replay()
    assert torch.equal(layer.running_mean, before)
    assert bool(y.isnan().all())


@on_one_rank_and_as_on_two
def test_host_waits(communicator: Communicator) -> None:
    """Nothing waits for the GPU after the first steps: torch raises where it would."""
    layer = _layer(IMAGES[1], communicator)
    x, dy = _on_device(data(IMAGES, torch.float32, 1)[0])
    for waits in (False, False, False, True, True):
        with host_waits_are_errors() if waits else contextlib.nullcontext():
            x.grad = None
            layer(x).backward(dy)
    layer.eval()
    with host_waits_are_errors():
        layer(x)
    synchronize()


@on_one_rank_and_as_on_two
def test_modes(communicator: Communicator) -> None:
    """Training after inference mode, in torch's own CUDA graphs, and in a step that overflows."""
    every = data(IMAGES, torch.float32, 1) * communicator.size
    layer, compiled_layer, half = (_layer(IMAGES[1], communicator) for _ in range(3))
    with torch.inference_mode():
        layer(every[0].x.to(DEVICE))
    layer.reset_running_stats()
    check_layer(layer, every)
    options: Any = sized({"mode": "reduce-overhead"}, {"backend": "eager"})
    call = torch.compile(compiled_layer, **options)
    for _ in range(3):  # torch compiles, records, and replays
        x, dy = _on_device(every[0])
        compiled_layer.zero_grad()  # gradients are in the graph's memory
        call(x).backward(dy)
    compiled_layer.reset_running_stats()
    compiled_layer.zero_grad()
    check_layer(compiled_layer, every, call=call)
    x = every[0].x.to(DEVICE, torch.float16)
    x[0, 0, 0, 0] = torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that the batch is skipped
        half(x)
        flush_checks()
    assert not half.running_mean.any()


@on_one_rank_and_as_on_two
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled(dtype: torch.dtype, communicator: Communicator) -> None:
    layer = _layer(IMAGES[1], communicator, dtype)
    call = torch.compile(layer, backend=sized("inductor", "eager"))
    check_layer(layer, data(IMAGES, dtype, 1) * communicator.size, call=call)


@pytest.mark.parametrize("over", ["nccl", "gloo", "mpi"])
def test_ranks(over: str) -> None:
    """A rank on each GPU over NCCL; two ranks on one GPU, with messages through host memory."""
    if over == "mpi" and not (importable("mpi4py") and find_command("mpiexec")):
        pytest.skip("mpi4py or mpiexec is missing")
    size = max(torch.cuda.device_count(), 1) if over == "nccl" else 2
    launcher = "mpiexec" if over == "mpi" else "torchrun" if size > 1 else ""
    command = launch_command(launcher, size, ["-m", "benchmarks.gpu.right", over])
    ran = run(command, timeout=sized(60, 180))
    assert ran.returncode == 0, ran.stdout


def enter_nccl() -> None:
    """Torch's default process group: of torchrun's ranks, one on each GPU, or of this process."""
    alone: Any = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    options = {} if "RANK" in os.environ else alone
    if not STAND_INS:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(sized("cpu:gloo,cuda:nccl", "gloo"), **options)


def main(over: str) -> None:
    if over == "nccl":
        enter_nccl()
    world: Any = TorchDistributed() if over == "nccl" else enter_world(over)
    for dtype in DTYPES:
        check_layer(_layer(IMAGES[1], world, dtype), data(IMAGES, dtype, world.size), world.rank)
    if world.size == 1:
        check_layer(_layer(IMAGES[1], Equal(world)), data(IMAGES, torch.float32, 1) * 2)
    leave_world()


def _layer(num_channels: int, communicator: Any, dtype: Any = torch.float32) -> Any:
    # Parameters beside activations of 16 bits are usually wider.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer = SyncBatchNorm(num_channels, process_group=communicator)
    return layer.to(DEVICE, wide)


def _on_device(pair: Data) -> tuple[Any, Any]:
    return pair.x.to(DEVICE, copy=True).requires_grad_(), pair.dy.to(DEVICE)


def data(
    shape: Sequence[int], dtype: torch.dtype, ranks: int, *, channels_last: bool = False
) -> list[Data]:
    """The same numbers on every rank: those of all ranks."""
    generator = torch.Generator().manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    every = []
    for rank in range(ranks):
        x, dy = (torch.randn(*shape, generator=generator) for _ in range(2))
        pair = (v.to(dtype).contiguous(memory_format=memory_format) for v in (2 * x + 3 + rank, dy))
        every.append(Data(*pair))
    return every


def check_layer(layer: Any, every: Sequence[Data], rank: int = 0, call: Any = None) -> None:
    """One training step of a new `layer` of multibn, on the GPU, against the oracle.

    `call` is the layer or something made of it, compiled for example.
    """
    dtype, C = every[rank].x.dtype, every[rank].x.shape[1]
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2.0, C))
        layer.bias.copy_(torch.linspace(-1.0, 1.0, C))
    weight, bias = (_array(p) for p in (layer.weight, layer.bias))
    x, dy = _on_device(every[rank])
    y = (layer if call is None else call)(x)
    y.backward(dy)
    xs, dys = (list(map(_array, values)) for values in zip(*every, strict=True))
    right = batch_norm(xs, dys, weight, bias, eps=layer.eps)
    columns = (C, *[1] * (y.ndim - 2))
    terms = dys[rank] * (right.y[rank] - bias.reshape(columns)) / weight.reshape(columns)
    axis = (0, *range(2, y.ndim))
    n = right.count
    start = np.zeros(C), np.ones(C)
    means = running(start, right.mean, right.var, n / (n - 1), layer.momentum)
    # A parameter's gradient has the parameter's dtype, and sums of 16-bit numbers are wide.
    errors = {
        "y": relative_error(_array(y), right.y[rank]) / BOUNDS[dtype],
        "dx": relative_error(_array(x.grad), right.dx[rank]) / BOUNDS[dtype],
        "dweight": _error_of_sum(layer.weight.grad, terms, axis) / 1e-6,
        "dbias": _error_of_sum(layer.bias.grad, dys[rank], axis) / 1e-6,
        "running_mean": relative_error(_array(layer.running_mean), means[0]) / 1e-6,
        "running_var": relative_error(_array(layer.running_var), means[1]) / 1e-6,
    }
    assert max(errors.values()) <= 1, errors


def _error_of_sum(got: Any, terms: Any, axis: tuple[int, ...]) -> float:
    return relative_error(_array(got), terms.sum(axis), np.abs(terms).sum(axis))


def _array(t: Tensor | None) -> Any:
    assert t is not None
    return t.detach().cpu().double().numpy()


if __name__ == "__main__":
    main(sys.argv[1])
