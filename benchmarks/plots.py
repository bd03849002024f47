"""The results as pictures."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import layer

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import pictures

# Each peer's name, marker and colour.
_PEERS = {
    layer.LOCAL: ("nn.BatchNorm (local)", "o", pictures.PLAIN),
    layer.NAIVE: ("detectron2's formula", "s", pictures.OTHER),
    layer.COPIES: (f"{layer.NUM_COPIES} copies of the input", "|", pictures.INK),
    layer.CHAINERMN: ("ChainerMN's link", "D", pictures.OTHER),
}
# Each way's label at the end of its curve, how far above the end, and its line.
_WAYS = {
    "all_gather": ("torch: all_gather", 1, pictures.OTHER, "-", 3),
    "ring_allreduce": ("allreduce, ring", 1, pictures.OTHER, "--", 1.5),
    "hierarchical": ("hierarchical", 1.4, pictures.OTHER, "-.", 1.5),
    "tree_allreduce": ("multibn: tree", 0.85, pictures.SYNCHRONIZED, "-", 3),
    "grouped": ("each node for itself", 0.75, pictures.SYNCHRONIZED, ":", 2),
    "mpi_allreduce": ("multibn over MPI", 1.2, pictures.SYNCHRONIZED, "--", 2),
}


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """All pictures whose results are there."""
    for name in ("torch", "chainer"):
        if any("ratio" in row for row in results.get(name, [])):
            pictures.save(partial(_layer, results[name]), folder / f"layer-{name}")
    if "model" in results:
        pictures.save(partial(_model, results["model"]), folder / "scaling")


def _layer(results: list[Mapping[str, Any]]) -> Figure:
    """The step of each shape divided by each peer's step; left of 1, multibn is faster."""
    rows = [row for row in results if "ratio" in row]
    figure, ax = _figure(1.5 + 0.27 * len(rows))
    for peer in rows[0]["ratio"]:
        label, marker, colour = _PEERS[peer]
        size = 11 if marker == "|" else 6
        ax.plot([r["ratio"][peer] for r in rows], range(len(rows)), marker, color=colour,
                markersize=size, markeredgewidth=2, fillstyle="none", label=label)  # fmt: skip
    labels = [f"{'x'.join(map(str, r['shape']))} {r['variant']}" for r in rows]
    ax.set_yticks(
        range(len(rows)), [label.replace("channels_", "ch. ") for label in labels], fontsize=10
    )
    ax.invert_yaxis()
    ax.axvline(1, color=pictures.INK, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    figure.suptitle("multibn's time / the other's: left of 1, multibn is faster", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10, columnspacing=1)
    return figure


def _model(rows: list[Mapping[str, Any]]) -> Figure:
    """The model from 8 to 8,192 ranks."""
    figure, ax = _figure(3.6)
    worlds = [row["ranks"] for row in rows]
    for way, (label, above, colour, line, width) in _WAYS.items():
        times = [row[way] / 1e3 for row in rows]
        ax.plot(worlds, times, line, color=colour, linewidth=width)
        ax.annotate(label, (worlds[-1], times[-1] * above), (5, 0), textcoords="offset points",
                    va="center", size=10, weight="bold" if width == 3 else None)  # fmt: skip
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.grid()
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds[::2], [f"{W:,}" for W in worlds[::2]], rotation=45)
    ax.set(xlabel="ranks")
    figure.suptitle("ms of a forward pass: ResNet-50, nodes of 8 GPUs (model)", fontsize=11)
    return figure


def _figure(height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(pictures.WIDTH, height), layout="constrained")
    return figure, figure.subplots()
