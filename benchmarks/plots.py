"""The results as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import layer

_LABELS = {
    layer.LOCAL: "nn.BatchNorm (local)",
    layer.NAIVE: "detectron2/TimeSformer formula",
    layer.COPIES: f"{layer.NUM_COPIES} copies of the input",
    layer.CHAINERMN: "ChainerMN's link",
}
_MARKERS = {layer.LOCAL: "o", layer.NAIVE: "s", layer.COPIES: "|", layer.CHAINERMN: "D"}
_WAYS = {
    "all_gather": ("torch: all_gather", "C3"),
    "ring_allreduce": ("allreduce, ring", "C7"),
    "hierarchical": ("hierarchical, three collectives", "C1"),
    "tree_allreduce": ("multibn: allreduce, tree", "C0"),
    "grouped": ("grouped: each node for itself", "C2"),
    "mpi_allreduce": ("allreduce over MPI between machines, latency assumed", "C4"),
}


def draw_layer(results: Mapping[str, Any], path: Path) -> None:
    """The step of each shape divided by each peer's step; left of 1, multibn is faster."""
    panels = [(name, rows) for name in ("torch", "chainer")
              if (rows := [r for r in results.get(name, []) if "ratio" in r])]  # fmt: skip
    if not panels:
        return
    heights = [len(rows) for _, rows in panels]
    figure = _figure(8.5, 1.6 + 0.27 * sum(heights) + 0.8 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for ax, (name, rows) in zip(axes, panels, strict=True):
        for peer in rows[0]["ratio"]:
            ax.plot([r["ratio"][peer] for r in rows], range(len(rows)), _MARKERS[peer],
                    markersize=11 if peer == layer.COPIES else 6, markeredgewidth=2,
                    fillstyle="none", label=_LABELS[peer])  # fmt: skip
        labels = [f"{'x'.join(map(str, r['shape']))}  {r['variant']}" for r in rows]
        ax.set_yticks(range(len(rows)), labels, fontsize=8.5)
        ax.invert_yaxis()
        ax.axvline(1, color="black", linewidth=1)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.grid(axis="x", color="0.9")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(f"{name}, {layer.OURS}'s step divided by that of", loc="left", fontsize=10)
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes[-1].set_xlabel(
        "forward and backward, float32, 2 ranks with one thread each, over MPI; below 1: faster"
    )
    figure.savefig(path, dpi=130)


def draw_scaling(results: Mapping[str, Any], path: Path) -> None:
    """The model from 8 to 8,192 ranks; beside it, measured and modelled times of 2 to 8 ranks."""
    model = results.get("model", [])
    measured = [r for r in results.get("collectives", []) if "model" in r]
    if not model or not measured:
        return
    figure = _figure(13, 4.6)
    ax, *small = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    worlds = [row["ranks"] for row in model]
    for way, (label, colour) in _WAYS.items():
        ax.plot(worlds, [row[way] / 1e3 for row in model], color=colour, label=label,
                linewidth=2.4 if "multibn" in label or "torch" in label else 1.3)  # fmt: skip
    _log(ax, worlds)
    ax.set_ylabel("ms of one forward pass")
    ax.set_title("Model: ResNet-50's 53 layers,\nGPUs in nodes of 8, NCCL", loc="left", fontsize=10)
    ax.legend(fontsize=8, frameon=False)
    for ax, over in zip(small, ("mpi", "gloo"), strict=True):
        _draw_small_end(ax, over, [r for r in measured if r["over"] == over])
    figure.savefig(path, dpi=130)


def _draw_small_end(ax: Any, over: str, rows: Sequence[Mapping[str, Any]]) -> None:
    C = max(row["channels"] for row in rows)
    colours = {"allreduce": "C0", "all_gather": "C3", "grouped": "C2", "hierarchical": "C1"}
    for way, colour in colours.items():
        points = [r for r in rows if r["way"] == way and r["channels"] == C]
        worlds = [r["ranks"] for r in points]
        ax.plot(worlds, [r["model"] for r in points], "--", color=colour, linewidth=1.2)
        ax.plot(worlds, [r["microseconds"] for r in points], "o", color=colour, label=way)
    ax.plot([], [], "--", color="0.4", label="model")
    _log(ax, worlds)
    ax.set_ylabel("µs of one message")
    title = f"Measured: {over}, one machine,\nC = {C}; model fitted at 2 ranks"
    ax.set_title(title, loc="left", fontsize=10)
    ax.legend(fontsize=8, frameon=False)


def _log(ax: Any, worlds: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(worlds, [f"{W:,}" for W in worlds], rotation=45 if len(worlds) > 4 else 0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set_xlabel("ranks")
    ax.grid(color="0.92")
    ax.spines[["top", "right"]].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
