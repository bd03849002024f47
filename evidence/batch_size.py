"""The size of the batch that is normalized (Wu and Johnson, 2021, arXiv:2105.07576, section 4).

MNIST-1D on two ranks. The batch of the gradient is always 256: parts of a rank's batch are
normalized by SubBatchNorm1d, a rank's batch by nn.BatchNorm1d, the whole by SyncBatchNorm.
"""

from typing import Any

import pictures
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

from benchmarks.tables import markdown
from evidence import shown, training
from multibn.torch import SubBatchNorm1d, SyncBatchNorm, update_bn_stats

NAME = "batch-size"
SIZES = (2,)
STEPS = 200
TOGETHER = (2, 4, 8, 16, 32, 64, 128, 256)  # samples that are normalized together
CURVES = {
    "train": ("batch statistics, training data", pictures.OTHER, "s--"),
    "test": ("batch statistics, validation data", pictures.OTHER, "o-"),
    "population": ("population statistics, validation data", pictures.INK, "o-"),
}


def measure(seed: int) -> list[dict[str, Any]]:
    """The three errors for each size. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (x, y), (test_x, test_y) = training.mnist1d()
    own = slice(rank, None, size)
    rows = []
    for together in TOGETHER:
        model = training.network(seed, lambda channels: _norm(together, channels))  # noqa: B023
        training.train(model, x, y, own, STEPS, seed)
        batch = training.RANK_BATCH
        row: dict[str, Any] = {"together": together}
        row["train"] = training.error(model, x[own], y[own], batch)
        row["test"] = training.error(model, test_x[own], test_y[own], batch)
        update_bn_stats(model, x[own].split(batch), progress=False)
        model.eval()
        row["population"] = training.error(model, test_x[own], test_y[own])
        rows.append(row)
    return rows


def _norm(together: int, channels: int) -> nn.Module:
    if together > training.RANK_BATCH:
        return SyncBatchNorm(channels)
    if together == training.RANK_BATCH:
        return nn.BatchNorm1d(channels)
    return SubBatchNorm1d(training.RANK_BATCH // together, channels)


def table(rows: shown.Rows) -> str:
    columns = ("samples normalized together", *(name for name, *_ in CURVES.values()))
    lines = [(str(n), *(shown.cell(shown.interval(rows, curve, together=n)) for curve in CURVES))
             for n in TOGETHER]  # fmt: skip
    return markdown(columns, lines)


def draw(rows: shown.Rows) -> Figure:
    figure = Figure(figsize=(pictures.WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    for curve, (name, color, line) in CURVES.items():
        values = [shown.interval(rows, curve, together=n) for n in TOGETHER]
        shown.curve(axes, TOGETHER, values, line, color=color, label=name)
    axes.set(title="Error, %", xlabel="samples normalized together", xscale="log", ylim=(0, 18))
    axes.set_xticks(TOGETHER, [str(n) for n in TOGETHER])
    axes.minorticks_off()
    axes.legend(fontsize=10, loc="upper right", handlelength=4)
    return figure
