"""Label skew: each rank holds other classes (Hsieh et al., 2020, arXiv:1910.00189).

Digits and the ResNet of `make demo` under DistributedDataParallel, 8 images for each rank.
"""

from typing import Any

import digits
import pictures
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from resnet_torch import ResNet
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.tables import markdown
from evidence import shown, training
from multibn.torch import convert_sync_batchnorm, sync_running_stats

NAME = "label-skew"
SIZES = (2, 5)
STEPS = 120
RATE = 0.2
IMAGES = 8
SPLITS = ("skewed", "independent")
NORMS = ("plain, statistics of rank 0", "plain, statistics pooled", "synchronized")


def _own_samples(y: Tensor, split: str, rank: int, size: int, seed: int) -> Tensor:
    """The training samples of a rank."""
    if split == "skewed":
        classes = torch.arange(rank, 10, size)
        return torch.isin(y, classes).nonzero()[:, 0]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return order[rank::size]


def measure(seed: int) -> list[dict[str, Any]]:
    """Accuracy of rank 0's model after training. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (x, y), (test_x, test_y) = (
        [torch.from_numpy(a) for a in part] for part in digits.load("float32")
    )
    rows = []
    for split in SPLITS:
        own = _own_samples(y, split, rank, size, seed)
        for synchronized in (False, True):
            torch.manual_seed(seed)
            model = ResNet()
            for weight in model.parameters():
                if weight.ndim > 1:
                    torch.nn.init.kaiming_normal_(weight)
            if synchronized:
                convert_sync_batchnorm(model)
            # Without the broadcast, rank 0 ends with the statistics that the broadcast copies.
            parallel = DistributedDataParallel(model, broadcast_buffers=False)
            optimizer = torch.optim.SGD(parallel.parameters(), RATE, momentum=0.9)
            for part in training.batches(len(own), IMAGES, STEPS, seed + 100 * rank):
                training.step(parallel, optimizer, x[own[part]], y[own[part]])
            del parallel
            for norm in NORMS[2:] if synchronized else NORMS[:2]:
                if norm == NORMS[1]:
                    sync_running_stats(model, how="pool")
                right = 100 - training.error(model.eval(), test_x, test_y)
                rows.append({"split": split, "norm": norm, "size": size, "accuracy": right})
    return rows


def table(rows: shown.Rows) -> str:
    lines = [(str(size),
              split if split == "independent" else f"{10 // size} classes on each rank",
              *(shown.cell(accuracy(rows, size, split, norm)) for norm in NORMS))
             for size in SIZES for split in SPLITS]  # fmt: skip
    return markdown(("ranks", "data", *NORMS), lines)


def draw(rows: shown.Rows) -> Figure:
    """Five ranks with two classes each: the row of the table that counts."""
    figure = Figure(figsize=(pictures.WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    looks = ((pictures.PLAIN, ""), (pictures.PLAIN, "///"), (pictures.SYNCHRONIZED, ""))
    names = ("statistics\nof one process", "statistics\npooled", "synchronized")
    for at, ((color, hatch), norm) in enumerate(zip(looks, NORMS, strict=True)):
        mean, low, high = accuracy(rows, 5, "skewed", norm)
        axes.bar(at, mean, 0.7, edgecolor=color, color="none" if hatch else color, hatch=hatch)
        axes.errorbar(at, mean, [[mean - low], [high - mean]], color=pictures.INK, capsize=4)
        axes.text(at - 0.08, mean + 2, f"{mean:.0f} %", ha="right", weight="bold", size=13)
    axes.set_xticks(range(3), names)
    axes.tick_params(axis="x", length=0)
    axes.set(title="Test accuracy, two classes on each of five processes", yticks=[], ylim=(0, 110))
    axes.spines["left"].set_visible(False)
    return figure


def accuracy(rows: shown.Rows, size: int, split: str, norm: str) -> tuple[float, float, float]:
    return shown.interval(rows, "accuracy", size=size, split=split, norm=norm)
