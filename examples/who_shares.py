"""Draw which ranks share batch statistics: docs/guides/who-shares.png.

python examples/who_shares.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "who-shares.png"
LEFT = [0, 4.9, 10.9, 15.8]  # of the four ranks, two on each machine
BLUE, ORANGE = ("#0072B2", "#7CC4EE"), ("#C24E00", "#F5B183")
GREEN, PURPLE = ("#00795A", "#7FD1B5"), ("#8E4A86", "#E3B3D6")

# Name, layer, who shares, batches that share, and the groups: first rank, last rank, their colours.
# Sample i belongs to part i % 2.
ROWS: list[tuple[str, str, str, int, list[tuple[int, int, tuple[str, ...]]]]] = [
    ("Sub-batch (ghost)", "SubBatchNorm2d(2, ...)", "2 samples: a part of a rank", 1,
     [(0, 0, BLUE), (1, 1, ORANGE), (2, 2, GREEN), (3, 3, PURPLE)]),
    ("Plain", "nn.BatchNorm2d", "4 samples: a rank", 1,
     [(0, 0, BLUE[:1]), (1, 1, ORANGE[:1]), (2, 2, GREEN[:1]), (3, 3, PURPLE[:1])]),
    ("Grouped", "NaiveSyncBatchNorm2d(2, ...)", "8 samples: 2 ranks, or a machine", 1,
     [(0, 1, BLUE[:1]), (2, 3, GREEN[:1])]),
    ("Synchronized", "SyncBatchNorm", "16 samples: all ranks", 1, [(0, 3, BLUE[:1])]),
    ("Precise", "update_bn_stats", "all samples of all batches,\nafter training", 3,
     [(0, 3, BLUE[:1])]),
]  # fmt: skip


def draw() -> Figure:
    figure = Figure(figsize=(12, 5.4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-9.4, 32.4), ylim=(-15.65, 3.15), aspect="equal")
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, color: str, alpha: float = 1) -> None:
        shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.12")
        shape.set(linewidth=0, facecolor=color, alpha=alpha)
        axes.add_patch(shape)

    for machine in range(2):
        box(LEFT[2 * machine] - 0.45, -15.1, 9.75, 16.6, "#F0F0F0")
        axes.text(LEFT[2 * machine] + 4.4, 2.2, f"machine {machine}", ha="center", weight="bold")
    for rank, x in enumerate(LEFT):
        axes.text(x + 2, 0.8, f"rank {rank}", ha="center")
    axes.text(21.2, 2.2, "same colour: same statistics", weight="bold")
    for row, (name, layer, shared, batches, groups) in enumerate(ROWS):
        y = -1.2 - 2.7 * row
        axes.text(-9.2, y + 0.75, name, va="center", size=14, weight="bold")
        axes.text(-9.2, y - 0.1, layer, va="center", size=9.5, family="monospace")
        axes.text(21.2, y + 0.46, shared, va="center", size=12)
        bottom = y - 1.08 * (batches - 1)
        for first, last, colors in groups:
            if len(colors) == 1:
                width = LEFT[last] + 4 - LEFT[first]
                box(LEFT[first], bottom, width, y + 0.92 - bottom, colors[0], alpha=0.25)
            for x in LEFT[first : last + 1]:
                for batch in range(batches):
                    for sample in range(4):
                        color = colors[sample % len(colors)]
                        box(x + sample + 0.14, y - 1.08 * batch + 0.12, 0.68, 0.68, color)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=100)
