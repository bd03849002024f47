"""The parts that check: each is a generator of rows, with an error and its bound."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist

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
from benchmarks.gpu.oracle import BOUNDS, Data, Row, check_layer, data, row
from multibn import Communicator, SingleProcess, as_communicator, kernels
from multibn._environment import find_command, importable
from multibn._launch import leave_world
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch_backend import SyncBatchNorm

ROOT = Path(__file__).parents[2]
IMAGES = sized((8, 64, 28, 28), (2, 3, 4, 5))
DTYPES = sized((torch.float32, torch.bfloat16), (torch.float32,))
COMMUNICATORS: Sequence[Communicator] = (SingleProcess(), Equal(SingleProcess()))


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
                f"{'x'.join(map(str, shape))} {_name(dtype)}"
                f"{' channels_last' if channels_last else ''}, {communicator.size} rank(s)",
                _layer(shape[1], communicator, dtype),
                every,
            )


def kernel_checks() -> Iterator[Row]:
    """The tests of Triton's kernels, on the GPU."""
    names = sorted(str(path) for path in (ROOT / "tests/kernels").glob("triton_*.py"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "results.xml")
        command = [
            # A library's new warning is no error of a kernel.
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest",
            "-o", "filterwarnings=default", "--timeout", "240", f"--junitxml={path}", *names,
        ]  # fmt: skip
        if STAND_INS:
            command += ["-k", "test_packed_moments or test_parts_of_a_message"]
        elif importable("xdist"):  # compilation takes most of the time
            command += ["-n", str(min(os.cpu_count() or 1, 12))]
        variables = os.environ | {"TRITON_INTERPRET": str(int(STAND_INS))}
        ran = subprocess.run(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        print(ran.stdout, flush=True)
        cases = list(ElementTree.parse(path).iter("testcase"))
    ends = [(case, {child.tag for child in case}) for case in cases]
    for case, end in ends:
        if end & {"failure", "error"} or ("skipped" in end and not STAND_INS):
            yield row(f"{case.get('classname')}.{case.get('name')}", 1.0, 0.0)
    passed = sum(not end & {"failure", "error", "skipped"} for _, end in ends)
    not_passed = len(ends) - passed if not STAND_INS else ran.returncode
    yield row(f"{passed} tests of Triton's kernels", not_passed if passed else 1.0, 0.0)


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
        replay()
        seen = int(layer.running_mean.isnan().sum())
        yield row(f"NaN in a replayed step shows in the running mean, {name}", abs(seen - 1), 0.0)


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
        what = f"compiled, {_name(dtype)}, {communicator.size} rank(s)"
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
        what = f"rank {world.rank} of {world.size}, {_name(dtype)}"
        yield from check_layer(what, _layer(IMAGES[1], world, dtype), every, world.rank)


def _layer(num_channels: int, communicator: Any, dtype: Any = torch.float32) -> Any:
    # Parameters beside activations of 16 bits are usually wider.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer = SyncBatchNorm(num_channels, process_group=communicator)
    return layer.to(DEVICE, wide)


def _on_device(pair: Data) -> tuple[Any, Any]:
    return pair.x.to(DEVICE, copy=True).requires_grad_(), pair.dy.to(DEVICE)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
