"""Moving averages against precise statistics (Wu and Johnson, 2021, arXiv:2105.07576, section 3).

MNIST-1D on two ranks with synchronized batch norm.
"""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

from evidence import training
from multibn.torch_backend import convert_sync_batchnorm, update_bn_stats

NAME = "moving-average"
SIZES = (2,)
STEPS = 200
EVERY = 8  # steps between two evaluations
SAMPLES = tuple(2**k for k in range(4, 13))  # of both ranks, from which statistics are computed
CHECKPOINTS = (40, 120, 200)  # steps after which the number of samples is varied


def measure(seed: int) -> list[dict[str, Any]]:
    """Error of validation, by moving averages and by precise statistics. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (x, y), test = training.mnist1d()
    model = convert_sync_batchnorm(training.network(seed))
    parallel = DistributedDataParallel(model)
    optimizer, schedule = training.optimizer_for(parallel, 0.2, STEPS)
    rows = []
    indices = training.batches(len(x), size * training.RANK_BATCH, STEPS, seed)
    for number, index in enumerate(indices, 1):
        part = index[rank::size]
        training.step(parallel, optimizer, x[part], y[part])
        schedule.step()
        if number % EVERY:
            continue
        wide = 1024 // size  # samples of a rank, enough for one evaluation
        numbers = SAMPLES if number in CHECKPOINTS else (1024,)
        for num_samples in numbers:
            precise = deepcopy(model)
            own = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(number))]
            own = own[:num_samples][rank::size]
            update_bn_stats(precise, own.split(wide), progress=False)
            rows.append({"step": number, "samples": num_samples, "error": _error(precise, *test)})
        average = deepcopy(model)
        rows.append({"step": number, "samples": 0, "error": _error(average, *test)})
    return rows


def _error(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return training.error(model.eval(), x, y)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| statistics from | " + " | ".join(f"step {n}" for n in CHECKPOINTS) + " |"]
    lines.append("|---" * (1 + len(CHECKPOINTS)) + "|")
    for samples in (0, *SAMPLES):
        cells = []
        for number in CHECKPOINTS:
            mean, low, high = training.interval(_errors(rows, number, samples))
            cells.append(f"{mean:.1f} % ({low:.1f} to {high:.1f})")
        name = f"{samples} samples" if samples else "moving averages"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    during, samples = figure.subplots(1, 2)
    steps = sorted({row["step"] for row in rows})
    for number, name, color in ((0, "moving averages", "#C24E00"), (1024, "precise", "#0072B2")):
        mean, low, high = zip(
            *(training.interval(_errors(rows, s, number)) for s in steps), strict=True
        )
        during.plot(steps, mean, color=color, label=name)
        during.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    during.set(xlabel="step", ylabel="validation error, %", title="during training", ylim=0)
    during.legend(frameon=False)
    for number, color in zip(CHECKPOINTS, ("#7CC4EE", "#0072B2", "black"), strict=True):
        values = [training.interval(_errors(rows, number, n)) for n in SAMPLES]
        mean, low, high = zip(*values, strict=True)
        samples.plot(SAMPLES, mean, "o-", color=color, label=f"after step {number}")
        samples.fill_between(SAMPLES, low, high, color=color, alpha=0.15, linewidth=0)
    samples.set(xlabel="samples for precise statistics", xscale="log", ylim=0)
    samples.set_xticks(SAMPLES, [str(n) for n in SAMPLES])
    samples.minorticks_off()
    samples.set_title("how many samples")
    samples.legend(frameon=False)
    for axes in (during, samples):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _errors(rows: list[dict[str, Any]], number: int, samples: int) -> list[float]:
    return [r["error"] for r in rows if (r["step"], r["samples"]) == (number, samples)]
