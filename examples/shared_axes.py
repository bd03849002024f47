"""Draw over which axes each norm takes its statistics: docs/guides/shared-axes.svg.

python examples/shared_axes.py
"""

from pathlib import Path

import pictures
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "shared-axes"
CHANNELS, COLUMNS = 4, 8  # each of the two ranks has half the columns

# Norm, meaning of a column, and the channels and columns that share statistics with the first cell.
ROWS: list[tuple[str, str, int, range]] = [
    ("batch, renorm", "samples", 1, range(8)),
    ("sub-batch", "samples", 1, range(0, 4, 2)),
    ("group", "positions of 1 sample", 2, range(8)),
    ("instance", "positions of 1 sample", 1, range(8)),
    ("running", "all observations so far", 1, range(8)),
    ("precise, pooled", "all samples", 1, range(8)),
]


def draw() -> Figure:
    figure = Figure(figsize=(pictures.WIDTH, 4.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.6, 21.2), ylim=(-19.2, 0.4), aspect="equal")
    axes.axis("off")
    for number, (name, columns, channels, shared) in enumerate(ROWS):
        left, top = 11.2 * (number % 2), -6.5 * (number // 2)
        axes.text(left, top - 0.4, name, weight="bold", va="center")
        axes.text(left, top - 1.5, columns, size=9, va="center")
        for column in range(COLUMNS):
            for channel in range(CHANNELS):
                x = left + 1.05 * column + 0.8 * (column >= COLUMNS // 2)
                fills = channel < channels and column in shared
                box = Rectangle((x, top - 3.1 - 0.85 * channel), 0.9, 0.7, linewidth=1.2)
                box.set(edgecolor=pictures.SYNCHRONIZED, facecolor=pictures.SYNCHRONIZED)
                box.set_alpha(1.0 if fills else 0.2)
                axes.add_patch(box)
    return figure


if __name__ == "__main__":
    pictures.save(draw, PICTURE)
