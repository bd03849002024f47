"""What the studies share in their tables and figures; every value is a percentage."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]


def interval(rows: Rows, column: str, **where: Any) -> tuple[float, float, float]:
    """Mean, lowest and highest of a column, of the rows that have these values."""
    values = [row[column] for row in rows if all(row[k] == v for k, v in where.items())]
    return float(np.mean(values)), float(min(values)), float(max(values))


def cell(of_interval: tuple[float, float, float]) -> str:
    mean, low, high = of_interval
    return f"{mean:.1f} % ({low:.1f} to {high:.1f})"


def curve(
    axes: Axes, x: Sequence[int], intervals: Iterable[tuple[float, float, float]], line: str,
    color: str, label: str,
) -> None:  # fmt: skip
    """Means over `x`, and a band from the lowest to the highest."""
    mean, low, high = zip(*intervals, strict=True)
    axes.plot(x, mean, line, color=color, label=label, linewidth=2)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
