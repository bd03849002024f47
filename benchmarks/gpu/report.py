"""The results as one table for people, gpu.md, and one figure, gpu.png."""

import io
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.timing import geometric_mean

Row = Mapping[str, Any]
OURS, PEER, LOCAL = "multibn", "nn.SyncBatchNorm", "nn.BatchNorm"
_COLOURS = {OURS: "C0", PEER: "C3", LOCAL: "C7"}
_WIDTH = 250  # so that no cell is cut
_LAYER = "a layer's step on the GPU"


def write(results: Mapping[str, Any], output: Path) -> None:
    """Write the table and the figure, and print the table."""
    console = Console(file=io.StringIO(), width=_WIDTH)
    lines = list(_heading(results))
    for title, columns, rows in _tables(results):
        table = Table(box=box.MARKDOWN, pad_edge=False)
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        with console.capture() as printed:
            console.print(table, markup=False)
        lines += [f"\n## {title}\n", printed.get().strip()]
    text = "\n".join(lines) + "\n"
    (output / "gpu.md").write_text(text)
    print(text)
    _draw(_rows(results, "time"), output / "gpu.png", _where(results))


def goals(results: Mapping[str, Any]) -> list[Row]:
    """What the times are judged by, as far as there are times: {what, value, bound, met}."""
    judged: list[Row] = []

    def judge(what: str, bound: float, values: Sequence[float], pick: Any = max) -> None:
        if values:
            value = float(pick(values))
            judged.append({"what": what, "value": value, "bound": bound, "met": value <= bound})

    if results["stand_ins"]:
        return judged
    rows = _rows(results, "time")
    steps = [row for row in rows if row["time"] == _LAYER]
    full = [row for row in steps if row["fills"]]
    judge("GPU time / nn.SyncBatchNorm's, geometric mean", 0.8,
          [_ratio(row) for row in steps], geometric_mean)  # fmt: skip
    judge("GPU time / eight passes at a copy's speed, sizes that fill the GPU, worst", 1.25,
          [row["microseconds"][OURS] / row["eight passes"] for row in full])  # fmt: skip
    judge("host time / nn.SyncBatchNorm's, worst", 1.3,
          [_ratio(row) for row in rows if row["time"].startswith("host")])  # fmt: skip
    judge("ResNet-50's step / with nn.SyncBatchNorm", 1.0,
          [_ratio(row) for row in rows if row["time"].startswith("ResNet")])  # fmt: skip
    return judged


def _ratio(row: Row) -> float:
    return float(row["microseconds"][OURS] / row["microseconds"][PEER])


def _rows(results: Mapping[str, Any], kind: str) -> list[Row]:
    return [row for part in results["parts"] for row in part["rows"] if kind in row]


def _where(results: Mapping[str, Any]) -> str:
    facts = {row["fact"]: row["value"] for row in _rows(results, "fact")}
    return ", ".join(
        [str(facts.get("device", "no device was found"))]
        + [f"{name} {facts[name]}" for name in ("driver", "CUDA of torch", "NCCL") if name in facts]
    )


def _heading(results: Mapping[str, Any]) -> Iterator[str]:
    versions = {"Python": results["machine"]["python"], **results["machine"]["versions"]}
    yield "# The GPU path, checked and timed\n"
    if results["stand_ins"]:
        yield "**Not run on a GPU: every part ran on stand-ins, and the times mean nothing.**\n"
    yield f"{results['date']}. {_where(results)}. {results['seconds']:.0f} s.\n"
    yield ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _tables(results: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    stand_ins = ["stand-in"] if results["stand_ins"] else []
    lines = []
    for part in results["parts"]:
        checks = [row for row in part["rows"] if "check" in row]
        line = [part["part"], part["status"], f"{part.get('seconds', 0):.0f}", str(len(checks))]
        line += [part.get("stand-in", "")] if stand_ins else []
        lines.append([*line, part.get("reason", "")[:80].replace("|", "/")])
    yield "Parts", ["part", "status", "s", "checks", *stand_ins, "reason"], lines
    wrong = [row for row in _rows(results, "check") if not row["ok"]]
    if wrong:
        yield "Failed checks", ["check", "error", "bound"], [
            [row["check"], f"{row['error']:.3g}", f"{row['bound']:.3g}"] for row in wrong
        ]  # fmt: skip
    judged = goals(results)
    if judged:
        yield "Goals", ["", "value", "at most", "met"], [
            [g["what"], f"{g['value']:.2f}", f"{g['bound']:.2f}", "yes" if g["met"] else "NO"]
            for g in judged
        ]  # fmt: skip
    rows = _rows(results, "time")
    names = [OURS, PEER, LOCAL]
    if rows:
        columns = ["microseconds", *names, f"/ {PEER}", f"/ {LOCAL}", "/ 8 passes", "GB/s, copy's"]
        yield "Times", columns, [
            [
                _label(row),
                *(f"{row['microseconds'][name]:.1f}" for name in names),
                *(f"{row['microseconds'][OURS] / row['microseconds'][name]:.2f}"
                  for name in names[1:]),
                *([f"{row['microseconds'][OURS] / row['eight passes']:.2f}",
                   f"{row['GB/s'][OURS]:.0f}, {row['copied GB/s']:.0f}"]
                  if "GB/s" in row else ["", ""]),
            ]
            for row in rows
        ]  # fmt: skip


def _label(row: Row) -> str:
    size = f"{'x'.join(map(str, row['shape']))} {row['dtype']} {row.get('layout', '')}".strip()
    return size if row["time"] == _LAYER else f"{row['time']}: {size}"


def _draw(rows: Sequence[Row], path: Path, where: str) -> None:
    """Times of layers divided by eight passes at a copy's speed; other times by the peer's."""
    layers = sorted((r for r in rows if r["time"] == _LAYER), key=lambda r: prod(r["shape"]))
    others = [row for row in rows if row["time"] != _LAYER]
    figure = Figure(figsize=(9, 2.4 + 0.26 * (len(layers) + len(others))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [
        (layers, "eight passes", "GPU time of a step / eight passes at a copy's speed"),
        (others, PEER, f"time / {PEER}'s"),
    ]
    panels = [panel for panel in panels if panel[0]]
    figure.suptitle(where or "no device", fontsize=9)
    if not panels:
        figure.text(0.5, 0.5, "no part has measured times", ha="center")
    else:
        heights = [len(panel[0]) + 1 for panel in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, (shown, unit, title) in zip(axes, panels, strict=True):
            for name, colour in _COLOURS.items():
                of_unit = [row["microseconds"].get(unit) or row[unit] for row in shown]
                ratios = [r["microseconds"][name] / u for r, u in zip(shown, of_unit, strict=True)]
                ax.plot(ratios, range(len(shown)), "o", color=colour, label=name)
            ax.set_yticks(range(len(shown)), [_label(row) for row in shown], fontsize=8)
            ax.invert_yaxis()
            ax.axvline(1, color="black", linewidth=1)
            ax.set_xlim(left=0)
            ax.grid(axis="x", color="0.9")
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_title(title, loc="left", fontsize=10)
        axes[0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
