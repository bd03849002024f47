"""The comparison as a heat map: combinations by cases, red where a bound is broken."""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure

from multibn.checkpoint.files import replacing
from multibn.parity.compare import Row
from multibn.parity.report import error_in_words, ordered, summary

# The colour scale is logarithmic in error/bound, and jumps from green to red at 1.
_RANGE = 4
_STEPS = 128
_INCHES_PER_CELL = 0.36


def write(rows: Sequence[Row], path: Path) -> None:
    """Draw `rows` into the PNG file `path`; peers have a block of their own."""
    titles = {False: "multibn", True: "the originals, for comparison"}
    by_peer = groupby(ordered(rows), key=lambda row: row.peer)
    blocks = [(titles[peer], list(block)) for peer, block in by_peer]
    cases = list(dict.fromkeys(name for row in rows for name in row.outcomes))
    size = (
        3.8 + _INCHES_PER_CELL * max(len(cases), 12),
        2.8 + _INCHES_PER_CELL * sum(len(block) + 1 for _, block in blocks),
    )
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(block) for _, block in blocks]
    axes = figure.subplots(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (title, block) in zip(axes, blocks, strict=True):
        image = _draw(ax, block, cases)
        words = f"{title}: layer · communicator · ranks"
        ax.set_title(words, loc="left", fontweight="bold", fontsize=10)
    for ax in axes[:-1]:
        ax.set_xticklabels([])
    figure.suptitle(f"Largest error against its bound: {summary(rows)}", fontsize=11)
    _add_scale(figure, image, axes)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def _draw(ax: Any, rows: Sequence[Row], cases: Sequence[str]) -> Any:
    grid = np.full((len(rows), max(len(cases), 1)), np.nan)
    for i, row in enumerate(rows):
        for j, case in enumerate(cases):
            if case in row.outcomes:
                grid[i, j] = math.log10(max(row.outcomes[case].error.ratio, 1e-30))
    grid = grid.clip(-_RANGE, _RANGE)
    image = ax.imshow(grid, cmap=_colours(), vmin=-_RANGE, vmax=_RANGE, aspect="auto")
    ax.set_facecolor("0.92")
    for i, row in enumerate(rows):
        if not row.outcomes:
            reason = f"{'failed' if row.failed else 'not run'}: {row.not_run}"
            ax.text(-0.3, i, reason[:90], va="center", fontsize=8, color="0.35", style="italic")
        for j, case in enumerate(cases):
            if case in row.outcomes and row.outcomes[case].broken:
                text = error_in_words(row.outcomes[case])
                light = grid[i, j] > _RANGE / 2
                ax.text(j, i, text, ha="center", va="center", fontsize=6,
                        color="white" if light else "black")  # fmt: skip
    ax.set_xticks(range(len(cases)), cases, rotation=50, ha="right", rotation_mode="anchor")
    ax.set_yticks(
        range(len(rows)), [f"{row.surface} · {row.communicator} · {row.size}" for row in rows]
    )
    ax.tick_params(length=0, labelsize=8.5)
    ax.set_xticks(np.arange(0.5, len(cases) - 1), minor=True)
    ax.set_yticks(np.arange(0.5, len(rows) - 1), minor=True)
    ax.grid(which="minor", color="white", linewidth=1)
    ax.tick_params(which="minor", length=0)
    for i in range(1, len(rows)):
        if rows[i].surface != rows[i - 1].surface:
            ax.axhline(i - 0.5, color="black", linewidth=1.2)
    ax.spines[:].set_visible(False)
    return image


def _add_scale(figure: Figure, image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=list(axes), pad=0.015, fraction=0.03, shrink=0.9)
    ticks = range(-_RANGE, _RANGE + 1)
    words = {-1: "a tenth", 0: "the bound", 1: "10 times", -_RANGE: "less", _RANGE: "more, NaN"}
    bar.set_ticks(list(ticks), labels=[words.get(t, f"$10^{{{t}}}$") for t in ticks])
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)


def _colours() -> Colormap:
    within = colormaps["Greens"](np.linspace(0.75, 0.2, _STEPS))
    beyond = colormaps["YlOrRd"](np.linspace(0.45, 1, _STEPS))
    return ListedColormap(
        np.concatenate([within, beyond]), name="error against bound"
    ).with_extremes(bad=(0, 0, 0, 0))
