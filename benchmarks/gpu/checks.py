"""The parts that check: each is a generator of rows, with an error and its bound."""

import contextlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from multibn import Communicator, SingleProcess, as_communicator, kernels
from multibn._environment import find_command, importable
from multibn._launch import leave_world
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.parity.oracle import batch_norm, relative_error, running
from multibn.torch_backend import SyncBatchNorm, check_sync

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
# Largest error, in units of the largest right value.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
IMAGES = sized((8, 64, 28, 28), (2, 3, 4, 5))
DTYPES = sized((torch.float32, torch.bfloat16), (torch.float32,))
COMMUNICATORS: Sequence[Communicator] = (SingleProcess(), Equal(SingleProcess()))


class Data(NamedTuple):
    """One rank's input, and the gradient of its output; in host memory."""

    x: Tensor
    dy: Tensor


def device() -> Iterator[Row]:
    """The GPU, and what it is driven by."""
    if STAND_INS:
        yield {"fact": "device", "value": "none: stand-ins in host memory"}
    else:
        properties = torch.cuda.get_device_properties(0)
        yield {"fact": "device", "value": properties.name}
        yield {"fact": "GPUs", "value": torch.cuda.device_count()}
        yield {"fact": "multiprocessors", "value": properties.multi_processor_count}
        yield {"fact": "memory, GiB", "value": round(properties.total_memory / 2**30)}
        if find_command("nvidia-smi"):  # some containers have the driver alone
            driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            asked = subprocess.run(driver, capture_output=True, text=True, check=True)
            yield {"fact": "driver", "value": asked.stdout.splitlines()[0]}
        yield {"fact": "NCCL", "value": ".".join(map(str, torch.cuda.nccl.version()))}
    yield {"fact": "CUDA of torch", "value": str(torch.version.cuda)}
    use_gpu_kernels()
    file = kernels.select(torch.zeros(1, device=DEVICE)).__name__
    yield row(f"tensors on the GPU go to {file}", float(file != "multibn.kernels.cuda"), 0)


def numbers() -> Iterator[Row]:
    """A layer's step by Triton's kernels, on one rank and as on two, in all dtypes and layouts."""
    use_gpu_kernels()
    shapes: Any = sized(
        [(32, 96, 14, 14), (8, 64, 56, 56), (5, 3, 9, 11), (256, 1000)],
        [(2, 3, 4, 5), (6, 4)],
    )  # fmt: skip
    dtypes: Any = sized(tuple(BOUNDS), (torch.float32, torch.bfloat16))
    for communicator, dtype, shape in product(COMMUNICATORS, dtypes, shapes):
        if dtype in (torch.float16, torch.float64) and shape != shapes[0]:
            continue  # each shape and dtype compiles its kernels: 0.4 s a kernel
        for channels_last in [False, True] if len(shape) == 4 else [False]:
            every = data(shape, dtype, 1, channels_last=channels_last)
            if communicator.size > 1:
                every = every * 2
            yield from check_layer(
                f"{'x'.join(map(str, shape))} {dtype_name(dtype)}"
                f"{' channels_last' if channels_last else ''}, {communicator.size} rank(s)",
                _layer(shape[1], communicator, dtype),
                every,
            )


def kernel_checks() -> Iterator[Row]:
    """The tests of Triton's kernels, on the GPU."""
    files = ("test_passes", "test_steps", "triton_passes", "triton_steps")
    names = [str(ROOT / f"tests/kernels/{name}.py") for name in files]
    command = [
        # A library's new warning is no error of a kernel.
        sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", "--noconftest",
        "-o", "filterwarnings=default", "--timeout", "240", *names,
    ]  # fmt: skip
    if STAND_INS:
        command += ["-k", "test_a_message_has_the_weight or test_parts_of_a_message"]
    elif importable("xdist"):  # compilation takes most of the time
        command += ["-n", str(min(os.cpu_count() or 1, 12))]
    variables = os.environ | {"TRITON_INTERPRET": str(int(STAND_INS))}
    ran = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    print(ran.stdout, flush=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", ran.stdout, re.MULTILINE)
    yield from (row(text[:200], 1.0, 0.0) for text in failed)
    *_, ends = ran.stdout.splitlines()  # "=== 12 passed, 2 skipped in 3 s ==="
    passed = re.search(r"\d+ passed", ends)
    wrong = ran.returncode or not passed or ("skipped" in ends and not STAND_INS)
    yield row(f"tests of Triton's kernels: {ends.strip('= ')}", float(bool(wrong)), 0.0)


def host_waits() -> Iterator[Row]:
    """After the first steps nothing waits for the GPU: torch raises where it would."""
    for communicator in COMMUNICATORS:
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
        yield row(f"host waits of steps, {communicator.size} rank(s)", 0.0, 0.0)


def graphs() -> Iterator[Row]:
    """A captured step gives the numbers of a step that is not, also for a new input."""
    for communicator in COMMUNICATORS:
        name = f"{communicator.size} rank(s)"
        layer, eager = (_layer(IMAGES[1], communicator) for _ in range(2))
        (x, dy), (other, _) = (_on_device(d) for d in data(IMAGES, torch.float32, 2))
        y = torch.empty_like(x)

        def step(layer: Any = layer, x: Any = x, dy: Any = dy, y: Any = y) -> None:
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
            errors = [float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)]
            yield row(f"replayed / eager, {name}", max(errors), 0.0)
        if STAND_INS:
            continue  # a step that is not captured raises where the input has NaN
        with torch.no_grad():
            x[0, 0] = torch.nan
        before = layer.running_mean.clone()
        replay()
        moved = not torch.equal(layer.running_mean, before) or not bool(y.isnan().all())
        yield row(f"NaN in a replayed step moves no statistics, {name}", float(moved), 0.0)


def modes() -> Iterator[Row]:
    """Training after inference mode, in torch's own CUDA graphs, and in a step that overflows."""
    compiler: Any = sized({"mode": "reduce-overhead"}, {"backend": "eager"})
    for communicator in COMMUNICATORS:
        name = f"{communicator.size} rank(s)"
        every = data(IMAGES, torch.float32, 1) * communicator.size
        layer, compiled_layer, half = (_layer(IMAGES[1], communicator) for _ in range(3))
        with torch.inference_mode():
            layer(every[0].x.to(DEVICE))
        layer.reset_running_stats()
        yield from check_layer(f"training after inference mode, {name}", layer, every)
        call = torch.compile(compiled_layer, **compiler)
        for _ in range(3):  # torch compiles, records, and replays
            x, dy = _on_device(every[0])
            call(x).backward(dy)
        compiled_layer.reset_running_stats()
        compiled_layer.zero_grad()
        yield from check_layer(f"{compiler}, {name}", compiled_layer, every, call=call)
        x = every[0].x.to(DEVICE, torch.float16)
        x[0, 0, 0, 0] = torch.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that the batch is skipped
            half(x)
            check_sync(half, communicator)  # reads the messages, see `look_at_unread`
        moved = float(half.running_mean.abs().sum())
        yield row(f"a float16 step that overflows moves no statistics, {name}", moved, 0.0)


def nccl() -> Iterator[Row]:
    """A rank on each GPU, over NCCL."""
    enter_nccl()
    world = TorchDistributed()
    every = data(IMAGES, torch.float32, world.size)
    what = f"rank {world.rank} of {world.size}"
    yield from check_layer(what, _layer(IMAGES[1], world), every, world.rank)
    if world.size == 1:
        layer = _layer(IMAGES[1], Equal(world))
        yield from check_layer(f"{what}, as two equal ranks", layer, every * 2)
    leave_world()


def gloo() -> Iterator[Row]:
    """Two ranks on one GPU: messages go through host memory."""
    dist.init_process_group("gloo")
    yield from _ranks(as_communicator(None))
    leave_world()


def mpi() -> Iterator[Row]:
    """Two ranks on one GPU over MPI."""
    from mpi4py import MPI

    yield from _ranks(as_communicator(MPI.COMM_WORLD))


def compiled() -> Iterator[Row]:
    """A layer under torch.compile."""
    for communicator, dtype in product(sized(COMMUNICATORS, COMMUNICATORS[1:]), DTYPES):
        layer = _layer(IMAGES[1], communicator, dtype)
        call = torch.compile(layer, backend=sized("inductor", "eager"))
        every = data(IMAGES, dtype, 1) * communicator.size
        what = f"compiled, {dtype_name(dtype)}, {communicator.size} rank(s)"
        yield from check_layer(what, layer, every, call=call)


def enter_nccl() -> None:
    """Torch's default process group: of torchrun's ranks, one on each GPU, or of this process."""
    alone: Any = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    options = {} if "RANK" in os.environ else alone
    if not STAND_INS:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(sized("cpu:gloo,cuda:nccl", "gloo"), **options)


def _ranks(world: Any) -> Iterator[Row]:
    for dtype in DTYPES:
        every = data(IMAGES, dtype, world.size)
        what = f"rank {world.rank} of {world.size}, {dtype_name(dtype)}"
        yield from check_layer(what, _layer(IMAGES[1], world, dtype), every, world.rank)


def _layer(num_channels: int, communicator: Any, dtype: Any = torch.float32) -> Any:
    # Parameters beside activations of 16 bits are usually wider.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer = SyncBatchNorm(num_channels, process_group=communicator)
    return layer.to(DEVICE, wide)


def _on_device(pair: Data) -> tuple[Any, Any]:
    return pair.x.to(DEVICE, copy=True).requires_grad_(), pair.dy.to(DEVICE)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def check_layer(
    what: str, layer: Any, every: Sequence[Data], rank: int = 0, call: Any = None
) -> Iterator[Row]:
    """One training step of a new `layer` of multibn, on the GPU, against the oracle.

    `call` is the layer or something made of it, compiled for example.
    """
    dtype, C = every[rank].x.dtype, every[rank].x.shape[1]
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2.0, C))
        layer.bias.copy_(torch.linspace(-1.0, 1.0, C))
    weight, bias = (_array(p) for p in (layer.weight, layer.bias))
    x = every[rank].x.to(DEVICE, copy=True).requires_grad_()
    y = (layer if call is None else call)(x)
    y.backward(every[rank].dy.to(DEVICE))
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
    worst = max(errors, key=lambda name: errors[name])
    yield row(what, errors[worst], 1.0, worst=worst)


def row(what: str, error: float, bound: float, **others: Any) -> Row:
    """The result of a check; NaN is an error."""
    return {"check": what, "error": error, "bound": bound, "ok": error <= bound, **others}


def _error_of_sum(got: Any, terms: Any, axis: tuple[int, ...]) -> float:
    return relative_error(_array(got), terms.sum(axis), np.abs(terms).sum(axis))


def _array(t: Tensor | None) -> Any:
    assert t is not None
    return t.detach().cpu().double().numpy()
