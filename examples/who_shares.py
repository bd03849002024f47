"""Draw which ranks share batch statistics: docs/guides/who-shares.svg.

python examples/who_shares.py
"""

from pathlib import Path

import pictures
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "who-shares"
LEFT = [0, 4.8, 10.6, 15.4]  # x coordinates of the four ranks, two per machine

# Name, layer, label, number of batches that share, (first, last) rank of each group, colour.
ROWS: list[tuple[str, str, str, int, list[tuple[int, int]], str]] = [
    ("Plain", "nn.BatchNorm2d", "4 samples: a rank", 1, [(r, r) for r in range(4)],
     pictures.PLAIN),
    ("Synchronized", "SyncBatchNorm", "16 samples: all ranks", 1, [(0, 3)], pictures.SYNCHRONIZED),
    ("Grouped", "NaiveSyncBatchNorm2d(2, ...)", "8 samples: 2 ranks", 1, [(0, 1), (2, 3)],
     pictures.SYNCHRONIZED),
    ("Sub-batch (ghost)", "SubBatchNorm2d(2, ...)", "2 samples: full, or hollow", 1,
     [(r, r) for r in range(4)], pictures.PLAIN),
    ("Precise", "update_bn_stats", "all samples, after training", 3, [(0, 3)], pictures.INK),
]  # fmt: skip


def draw() -> Figure:
    figure = Figure(figsize=(pictures.WIDTH, 5.82))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, 20.4), ylim=(-25.2, 0.75), aspect="equal")
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, color: str, alpha: float) -> None:
        shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.12")
        shape.set(linewidth=1.5, edgecolor=color, facecolor=(color, alpha))
        axes.add_patch(shape)

    axes.text(-0.7, -0.2, "One box: the same statistics.", weight="bold")
    for rank, x in enumerate(LEFT):
        axes.text(x + 2, -2.4, f"rank {rank}", ha="center", size=10)
    for machine in range(2):
        axes.text(LEFT[2 * machine] + 4.4, -1.4, f"machine {machine}", ha="center", size=10)
    y = -3.5
    for name, layer, shared, batches, groups, color in ROWS:
        axes.text(-0.7, y - 0.3, name, va="center", weight="bold")
        axes.text(20, y - 0.3, shared, va="center", ha="right", size=10)
        axes.text(-0.7, y - 1.3, layer, va="center", size=10, family="monospace")
        top = y - 2.1
        bottom = top - 1.08 * batches
        for first, last in groups:
            width = LEFT[last] + 4 - LEFT[first]
            box(LEFT[first], bottom, width, top - bottom, color, 0.15)
            for x in LEFT[first : last + 1]:
                for batch in range(batches):
                    for sample in range(4):
                        hollow = name.startswith("Sub") and sample % 2
                        at = (x + sample + 0.2, top - 1.08 * batch - 0.85)
                        box(*at, 0.6, 0.6, color, 0.0 if hollow else 1.0)
        y = bottom - 0.8
    return figure


if __name__ == "__main__":
    pictures.save(draw, PICTURE)
