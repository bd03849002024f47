"""The size of the batch that is normalized (Wu and Johnson, 2021, arXiv:2105.07576, section 4).

MNIST-1D on two ranks. The batch of the gradient is always 256: parts of a rank's batch are
normalized by SubBatchNorm1d, a rank's batch by nn.BatchNorm1d, the whole by SyncBatchNorm.
"""

from typing import Any

import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evidence import training
from multibn.torch_backend import SubBatchNorm1d, SyncBatchNorm, update_bn_stats

NAME = "batch-size"
SIZES = (2,)
STEPS = 200
TOGETHER = (2, 4, 8, 16, 32, 64, 128, 256)  # samples that are normalized together
CURVES = {
    "train": ("batch statistics, training data", "#7CC4EE"),
    "test": ("batch statistics, validation data", "#C24E00"),
    "population": ("population statistics, validation data", "black"),
}


def measure(seed: int) -> list[dict[str, Any]]:
    """The three errors for each size. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (x, y), (test_x, test_y) = training.mnist1d()
    own = slice(rank, None, size)
    rows = []
    for together in TOGETHER:
        model = training.network(seed, lambda channels: _norm(together, channels))  # noqa: B023
        parallel = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer, schedule = training.optimizer_for(parallel, 0.2, STEPS)
        for index in training.batches(len(x), size * training.RANK_BATCH, STEPS, seed):
            training.step(parallel, optimizer, x[index[own]], y[index[own]])
            schedule.step()
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


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| samples normalized together | " + " | ".join(n for n, _ in CURVES.values()) + " |"]
    lines.append("|---|---|---|---|")
    for together in TOGETHER:
        cells = []
        for curve in CURVES:
            mean, low, high = training.interval(_errors(rows, together, curve))
            cells.append(f"{mean:.1f} % ({low:.1f} to {high:.1f})")
        lines.append(f"| {together} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for curve, (name, color) in CURVES.items():
        values = [training.interval(_errors(rows, n, curve)) for n in TOGETHER]
        mean, low, high = zip(*values, strict=True)
        axes.plot(TOGETHER, mean, "o-", color=color, label=name)
        axes.fill_between(TOGETHER, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="samples normalized together", ylabel="error, %", xscale="log", ylim=0)
    axes.set_xticks(TOGETHER, [str(n) for n in TOGETHER])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _errors(rows: list[dict[str, Any]], together: int, curve: str) -> list[float]:
    return [row[curve] for row in rows if row["together"] == together]
