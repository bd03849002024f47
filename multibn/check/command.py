"""`multibn check`, run on every rank; rank 0 prints the report."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from multibn import info
from multibn._platform import importable, launched_processes, this_machine
from multibn.check.timing import Step, median_ms, message_steps, slowest, take_turns
from multibn.communicators import Communicator
from multibn.communicators.communicator import gather
from multibn.communicators.watchdog import check_timeout
from multibn.parity import worker
from multibn.parity.launch import enter_world, leave_world

CASES = ("float32", "float64", "uneven", "empty-rank", "masked", "channels_last")
SIZES = {True: (64, 224), False: (4, 112)}  # (images per rank, image size) with and without a GPU
SECONDS = 20.0  # to measure the network; other measurements take a fraction of this time
VERDICTS = {True: "all results are correct", False: "some results are WRONG"}
_REPEAT = 20  # messages in a step


def run(args: argparse.Namespace) -> int:
    """Check results and measure speed on the processes that your launcher started.

    Reports the ranks and their transport, errors compared with a float64 oracle,
    and the times of a message, of a layer and of ResNet-50's step, in one to two
    minutes. Rank 0 prints. Exit status: 0 all results are correct, 1 some are
    wrong, 2 the check failed to run.

    multibn check
    torchrun --nproc-per-node 2 -m multibn check
    mpiexec -n 2 python -m mpi4py -m multibn check --json
    """
    try:
        communicator = _enter()
        report = collect(communicator)
    except RuntimeError:  # for example, if a rank was lost
        traceback.print_exc()
        return 2
    if communicator.rank == 0:
        print(json.dumps(report, indent=1) if args.json else info.text(report), flush=True)
    leave_world()
    return int(report["verdict"] != VERDICTS[True])


def _torchrun() -> bool:
    return "RANK" in os.environ and importable("torch")


def _enter() -> Communicator:
    """Return a communicator of the ranks that the launcher started. Collective."""
    if _torchrun():
        import torch

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=check_timeout()))
        return enter_world("gloo")
    return enter_world("mpi" if launched_processes()[1] > 1 else "single process")


def collect(communicator: Communicator) -> dict[str, Any]:
    """Run the checks, and return the report with the facts of `multibn info`. Collective."""
    start, times = time.monotonic(), {}

    def print_progress(what: str) -> None:
        if communicator.rank == 0:
            print(f"{time.monotonic() - start:3.0f} s: {what}", file=sys.stderr, flush=True)

    adapters = [name for name in worker.ADAPTERS if importable(name)]
    if not adapters:
        raise ImportError(
            "neither torch nor chainer is installed: pip install '.[torch]' in multibn's checkout"
        )
    machines = gather(this_machine(), communicator)
    gpu = _use_gpu(communicator, machines)
    print_progress("checking results")
    ranks = gather(worker.measure(communicator, adapters, CASES), communicator)
    errors = sorted(worker.Error(*each) for rank in ranks for each in rank)
    numbers = {f"{e.adapter}, {e.case}": e for e in errors}  # the worst error comes last
    channel = getattr(communicator, "channel", None)
    transport = "" if channel is None else channel.transport.carrier
    peer = "NCCL" if gpu else "gloo"
    if hasattr(communicator, "mpi_comm"):
        peer = "MPI"
    elif gpu and communicator.size > 1 and transport:
        transport = f"NCCL, {transport}"
    labels = {"checked": f"multibn over {transport}", "bare": f"{peer} allreduce"}
    for what, n, seconds, steps in _comparisons(communicator, bool(gpu)):
        print_progress(what)
        wait = sys.modules["torch"].cuda.synchronize if gpu else lambda: None
        own = take_turns(steps, communicator, seconds=seconds, wait=wait, finish=wait)
        rank_times = gather({name: t.tolist() for name, t in own.items()}, communicator)
        medians = {name: 1e3 * median_ms(t) / n for name, t in slowest(rank_times).items()}
        times[what] = {
            labels.get(name, name): round(us, 1 if us < 100 else None)
            for name, us in medians.items()
        }
    return info.collect() | {
        "ranks": {
            "number": communicator.size,
            "machines": len(set(machines)),
            "over": transport or "no communication (one process)",
            "compute on": gpu or "CPU",
        },
        "numbers": {
            name: {"error": float(f"{e.error:.2g}"), "bound": e.bound, "in": e.quantity}
            | {"verdict": "ok" if e.ratio <= 1 else "WRONG"}
            for name, e in sorted(numbers.items())
        },
        "microseconds": times,
        "verdict": VERDICTS[errors[-1].ratio <= 1],
    }


def _use_gpu(communicator: Communicator, machines: list[str]) -> str:
    """Use one GPU per rank, and return its name; return "" if there are too few. Collective."""
    torch: Any = import_module("torch") if importable("torch") else None
    local_rank = machines[: communicator.rank].count(machines[communicator.rank])
    num_left = torch.cuda.device_count() - local_rank if torch else 0
    if min(gather(num_left, communicator)) < 1:
        return ""
    torch.cuda.set_device(local_rank)
    torch.set_default_device(f"cuda:{local_rank}")
    return str(torch.cuda.get_device_name())


def _comparisons(
    communicator: Communicator, on_gpu: bool
) -> Iterator[tuple[str, int, float, Mapping[str, Step]]]:
    """Yield (title, repetitions per step, seconds, steps to compare) for each measurement."""
    for C in (64, 2048) if communicator.size > 1 else ():
        steps = message_steps(communicator, C, repeat=_REPEAT, on_gpu=on_gpu)
        yield f"message of {C} channels", _REPEAT, SECONDS / 10, steps
    if not importable("torch"):
        return
    network = import_module("multibn.check.network")
    number, side = SIZES[on_gpu]
    for name, shape, seconds in (
        ("layer", (number, 64, side // 4, side // 4), SECONDS / 5),
        ("ResNet-50", (number, 3, side, side), SECONDS),
    ):
        # nn.SyncBatchNorm needs a process group, and tensors on GPUs.
        steps = network.training_steps(name, shape, communicator, peer=on_gpu and _torchrun())
        yield f"step of {name}, {'x'.join(map(str, shape))}", 1, seconds, steps
