"""The results as tables in the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import layer

_WIDTH = 124  # of the tables, if the output is no terminal


def console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def show(name: str, results: Any) -> None:
    """Print the results of the part `name`."""
    out = console()
    rows = results if isinstance(results, list) else [results]
    for reason in (row["not_run"] for row in rows if "not_run" in row):
        out.print(f"{name}: not run: {reason}\n", markup=False)
        return
    out.print(_TABLES[name](results))


def show_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (t["what"], f"{t['value']:.3f}", f"{t['bound']:.3f}", "yes" if t["met"] else "NO")
        for t in targets
    ]
    console().print(_table("Judged by", ("", "value", "at most", "met"), rows))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _layer(title: str) -> Callable[[Any], Table]:
    def table(rows: Sequence[Mapping[str, Any]]) -> Table:
        peers = list(rows[0]["ratio"])
        columns = ["shape", "", "MB", "multibn ms", *(f"/ {name}" for name in peers)]
        lines = [
            [
                _shape(row),
                row["variant"],
                f"{row['megabytes']:.1f}",
                f"{row['milliseconds'][layer.OURS]:.2f}",
                *(_ratio(row, name) for name in peers),
            ]
            for row in rows
        ]
        return _table(f"{title}: {_RATIO}", columns, lines)

    return table


_RATIO = "ratios on the wall ± half their quartiles' distance (of the processor's times)"


def _ratio(row: Mapping[str, Any], peer: str) -> str:
    ratio, spread, processor = (row[column][peer] for column in ("ratio", "spread", "processor"))
    return f"{ratio:.2f} ±{spread:.2f} ({processor:.2f})"


def _shape(row: Mapping[str, Any]) -> str:
    return "x".join(map(str, row["shape"]))


def _network(rows: Sequence[Mapping[str, Any]]) -> Table:
    """With the network "waiting": local batch norms that wait for the other rank, as ours do."""
    peers = list(rows[0]["ratio"])
    lines = [
        [row['layout'],
         *(f"{ms:.0f}" for ms in row["milliseconds"].values()),
         *(_ratio(row, peer) for peer in peers)]
        for row in rows
    ]  # fmt: skip
    title = f"A step of a network like ResNet-50, 2 ranks, each {_shape(rows[0])}: {_RATIO}"
    columns = (
        "",
        "multibn ms",
        *(f"{peer} ms" for peer in peers),
        *(f"/ {peer}" for peer in peers),
    )
    return _table(title, columns, lines)


def _compiled(rows: Sequence[Mapping[str, Any]]) -> Table:
    peers = list(rows[0]["ratio"])
    lines = [
        [row["layout"], f"{row['milliseconds']:.1f}", *(_ratio(row, peer) for peer in peers)]
        for row in rows
    ]
    title = f"A compiled residual block, 2 ranks, each {_shape(rows[0])}: {_RATIO}"
    return _table(title, ("", "compiled ms", *(f"/ {peer}" for peer in peers)), lines)


def _calls(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        [f"{row['over']}, {row['ranks']} ranks",
         *(str(row[kind][whose]) for kind in ("synchronized", "local")
           for whose in ("multibn", "torch"))]
        for row in rows
    ]  # fmt: skip
    columns = ("", "synchronized: multibn's", "torch's", "local: multibn's", "torch's")
    return _table("Python calls in a layer's step", columns, lines)


def _messages(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        [f"{row['over']}, C={row['channels']}",
         *(f"{row['microseconds'][name]:,.1f}" for name in ("checked", "bare"))]
        for row in rows
    ]  # fmt: skip
    title = "A layer's message on 2 ranks, us (bare: MPI's or torch.distributed's allreduce)"
    return _table(title, ("", "with all checks", "bare"), lines)


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Table:
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['over']}, {row['ranks']} ranks, C={row['channels']}"
        cell = f"{row['microseconds']:,.0f} ({row['microseconds'] / row['model']:.1f})"
        lines.setdefault(name, [name]).append(cell)
    title = "Messages of one forward pass: us (measured / model fitted at 2 ranks)"
    return _table(title, ("", *ways), lines.values())


def _model(rows: Sequence[Mapping[str, float]]) -> Table:
    ways = [name for name in rows[0] if name != "ranks"]
    lines = [[str(row["ranks"]), *(f"{row[way] / 1e3:.2f}" for way in ways)] for row in rows]
    title = "Model: forward messages of ResNet-50's 53 layers on a cluster, ms"
    return _table(title, ("ranks", *ways), lines)


def _reversible_memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        [f"{row['model']}, {row['attention']} attention",
         *(f"{row[mode][kind] / row['batch'] / 2**20:.1f}"
           for kind in ("saved", "peak") for mode in ("stored", "reversible")),
         f"{row['ratio']['peak']:.1f}"]
        for row in rows
    ]  # fmt: skip
    columns = ("MiB an image", "saved, stored", "reversible", "peak, stored", "reversible", "ratio")
    return _table("Memory of a reversible model's step", columns, lines)


def _reversible_time(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        [f"{row['model']}, {row['batch']} images",
         *(f"{ms:.0f}" for ms in row["milliseconds"].values()), _ratio(row, "stored")]
        for row in rows
    ]  # fmt: skip
    title = f"A step of a reversible model, ms: {_RATIO}"
    return _table(title, ("", "stored", "reversible", "ratio"), lines)


_TABLES: dict[str, Callable[[Any], Table]] = {
    "torch": _layer("torch, one layer's step on 2 ranks over MPI"),
    "relu": _layer("torch, a step of one layer and ReLU on 2 ranks over MPI"),
    "chainer": _layer("Chainer, one layer's step on 2 ranks over MPI"),
    "resnet": _network,
    "compiled": _compiled,
    "calls": _calls,
    "messages": _messages,
    "collectives": _collectives,
    "model": _model,
    "reversible_memory": _reversible_memory,
    "reversible_time": _reversible_time,
}
