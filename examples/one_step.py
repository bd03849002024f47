"""Draw one training step of a layer on two ranks: docs/guides/one-step.svg.

python examples/one_step.py
"""

from pathlib import Path

import pictures
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "one-step"
CENTRES = (2.6, 9.4)  # x coordinates of the two ranks
# Label and numbers of each box, top to bottom, and the colour: PLAIN for the numbers of one rank.
MESSAGE = "1 message: the sum over both ranks"
STEPS: list[tuple[str, str, str]] = [
    ("its own part: 4 samples", "x", pictures.PLAIN),
    ("its mean and mean square", "mean, meansqr, count", pictures.PLAIN),
    (MESSAGE, "2C + 4 numbers", pictures.SYNCHRONIZED),
    ("mean, variance of all 8", "y = (x - mean) / std", pictures.SYNCHRONIZED),
    ("backward: its two sums", "sum_dy, sum_dy_xhat", pictures.PLAIN),
    (MESSAGE, "2C + 2 numbers", pictures.SYNCHRONIZED),
    ("one process's gradient", "dx", pictures.SYNCHRONIZED),
]


def draw() -> Figure:
    figure = Figure(figsize=(pictures.WIDTH, 5.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.4, 12.4), ylim=(-14.3, 0.5))
    axes.axis("off")
    for rank, centre in enumerate(CENTRES):
        axes.text(centre, 0, f"rank {rank}", ha="center", va="center", weight="bold")
    for row, (label, numbers, color) in enumerate(STEPS):
        y, together = -1.4 - 2 * row, label == MESSAGE
        for centre in (6.0,) if together else CENTRES:
            width = 11.4 if together else 4.9
            shape = FancyBboxPatch((centre - width / 2, y - 0.6), width, 1.1)
            shape.set(boxstyle="round,pad=0.12", linewidth=1.5, edgecolor=color, facecolor="none")
            axes.add_patch(shape)
            axes.text(centre, y + 0.2, label, ha="center", va="center", size=9)
            axes.text(
                centre, y - 0.35, numbers, ha="center", va="center", size=9, family="monospace"
            )
        if row:
            for centre in CENTRES:
                arrow = {"arrowstyle": "->", "color": pictures.INK}
                axes.annotate("", (centre, y + 0.68), (centre, y + 1.22), arrowprops=arrow)
    return figure


if __name__ == "__main__":
    pictures.save(draw, PICTURE)
