"""Cost and accuracy of each kind of batch norm: the last table of evidence/README.md.

python examples/which_batch_norm.py

Launches itself under torchrun with 1, 2 and 4 ranks, and takes about five minutes on two cores.
Times are CPU times of rank 0, which other programs hardly affect. The kinds take turns, step by
step, so that changes of the machine's load affect all kinds equally.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import numpy as np
import torch
import torch.distributed as dist
from common import LEARNING_RATE, MOMENTUM
from resnet_torch import ResNet, accuracy
from torch import Tensor, nn
from torch.nn import functional as F

from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch import (
    SubBatchNorm2d,
    average_gradients,
    convert_sync_batchnorm,
    sync_running_stats,
    update_bn_stats,
)

NUM_STEPS = 3 * digits.STEPS_PER_EPOCH
SEEDS = range(3)


def sub_batch(module: nn.Module, group: Any) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, SubBatchNorm2d(2, child.num_features))
        sub_batch(child, group)


def plain(model: nn.Module, group: Any) -> None:
    pass


# By number of ranks.
KINDS: dict[int, dict[str, Callable[[nn.Module, Any], object]]] = {
    1: {"plain": plain, "sub-batch, 2 parts": sub_batch},
    2: {"plain": plain, "synchronized": convert_sync_batchnorm},
    4: {"plain": plain, "grouped, 2 ranks": convert_sync_batchnorm},
}
SHARING = {"grouped, 2 ranks": 2}  # ranks per group; in other kinds, all ranks share or none


class Training:
    def __init__(self, convert: Callable[[nn.Module, Any], object], seed: int, group: Any) -> None:
        torch.manual_seed(seed)
        self.model = ResNet()
        for weight in self.model.parameters():
            if weight.ndim > 1:
                nn.init.kaiming_normal_(weight)
        convert(self.model, group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        dist.barrier()  # ranks start together
        start = time.process_time()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        average_gradients(self.model.parameters())
        self.optimizer.step()
        self.seconds.append(time.process_time() - start)
        self.losses.append(loss.detach())


def measure(seed: int) -> None:
    from tests.helpers.ranks import CountingCommunicator  # found in the checkout by `launch`

    rank, size = dist.get_rank(), dist.get_world_size()
    (x, y), test = ([torch.from_numpy(a) for a in images] for images in digits.load("float32"))
    order = np.random.default_rng(seed).permutation(digits.NUM_TRAIN)  # different batches per seed
    x, y = x[order], y[order]
    trainings = {
        name: Training(convert, seed, SHARING.get(name)) for name, convert in KINDS[size].items()
    }
    for part in digits.batches(NUM_STEPS, rank, size):
        for training in trainings.values():
            training.step(x[part], y[part])

    loader = [x[part] for part in digits.batches(digits.STEPS_PER_EPOCH, rank, size)]

    def precise(model: nn.Module, group: Any) -> None:
        update_bn_stats(model, loader, process_group=group, progress=False)

    unit = statistics.median(trainings["plain"].seconds)
    for name, training in trainings.items():
        model = training.model
        # Messages are counted in a separate training, because counting is slow.
        counting = CountingCommunicator(TorchDistributed().split(rank // SHARING.get(name, size)))
        counted = Training(KINDS[size][name], seed, counting)
        counted.step(x[part], y[part])
        loss = torch.stack(training.losses[-digits.STEPS_PER_EPOCH :]).mean()
        dist.all_reduce(loss)

        def report(suffix: str, seconds: float) -> None:
            # Every rank evaluates with its own statistics; rank 0's accuracy is reported.
            row = {"name": f"{name}{suffix}", "accuracy": accuracy(model, *test)}  # noqa: B023
            row |= {"ranks": size, "loss": loss.item() / size, "time": seconds / unit}  # noqa: B023
            if rank == 0:
                print(json.dumps(row | {"sizes": counting.take()}), flush=True)  # noqa: B023

        report("", statistics.median(training.seconds))
        if size != 2:
            continue

        def call(suffix: str, function: Callable[[nn.Module, Any], object]) -> None:
            function(counted.model.train(), counting)  # noqa: B023
            start = time.process_time()
            function(model.train(), None)  # noqa: B023
            report(suffix, time.process_time() - start)

        if name == "plain":
            call(" + pool", lambda model, group: sync_running_stats(model, group, "pool"))
        call(" + precise", precise)


def launch(size: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), __file__, "--rank"]
    checkout = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": checkout}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    print("| batch norm | ranks x images | test accuracy | loss | time | messages | numbers |")
    print("|---|---|---|---|---|---|---|")
    for size in KINDS:
        rows = launch(size)
        for name in dict.fromkeys(row["name"] for row in rows):
            runs = [row for row in rows if row["name"] == name]
            percent = [100 * run["accuracy"] for run in runs]
            loss = statistics.mean(run["loss"] for run in runs)
            ratio = statistics.median(run["time"] for run in runs)
            sizes = runs[0]["sizes"]
            print(
                f"| {name} | {size} x {digits.BATCH_SIZE // size} "
                f"| {statistics.mean(percent):.1f} % ({min(percent):.1f} to {max(percent):.1f}) "
                f"| {loss:.3f} | {ratio:.1f} | {len(sizes)} | {sum(sizes):,} |",
                flush=True,
            )


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        for seed in SEEDS:
            measure(seed)
        dist.destroy_process_group()
    else:
        main()
