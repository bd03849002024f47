"""Moving averages against precise statistics (Wu and Johnson, 2021, arXiv:2105.07576, section 3).

MNIST-1D on two ranks with synchronized batch norm.
"""

from copy import deepcopy
from typing import Any

import pictures
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

from benchmarks.tables import markdown
from evidence import shown, training
from multibn.torch import convert_sync_batchnorm, update_bn_stats

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
            wrong = training.error(precise.eval(), *test)
            rows.append({"step": number, "samples": num_samples, "error": wrong})
        wrong = training.error(deepcopy(model).eval(), *test)
        rows.append({"step": number, "samples": 0, "error": wrong})
    return rows


def table(rows: shown.Rows) -> str:
    columns = ("statistics from", *(f"step {n}" for n in CHECKPOINTS))
    lines = [(f"{n} samples" if n else "moving averages",
              *(shown.cell(shown.interval(rows, "error", step=step, samples=n))
                for step in CHECKPOINTS))
             for n in (0, *SAMPLES)]  # fmt: skip
    return markdown(columns, lines)


def draw(rows: shown.Rows) -> Figure:
    figure = Figure(figsize=(pictures.WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    steps = sorted({row["step"] for row in rows})
    for n, name, color in (
        (0, "moving averages", pictures.SYNCHRONIZED),
        (1024, "precise statistics", pictures.INK),
    ):
        values = [shown.interval(rows, "error", step=step, samples=n) for step in steps]
        shown.curve(axes, steps, values, "-" if n else "--", color=color, label=name)
    axes.set(xlabel="step of the training", title="Validation error, %", ylim=0)
    axes.legend()
    return figure
