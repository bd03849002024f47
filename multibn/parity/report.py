"""The comparison for people, as a table in the terminal and a heat map, and for programs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import multibn
from multibn.checkpoint.files import replacing
from multibn.parity.compare import Outcome, Row, exit_status, messages

_STYLES = {"failed": "bold red", "BROKEN": "bold red", "not run": "dim", "ok": "green"}
_CAPTION = """\
error: the largest one for its bound, relative to the largest expected entry.
apart: from the other combinations with as many ranks, in units of the bound.
allreduce: numbers in each message of a step, forward + backward."""


def console(*, stderr: bool = False) -> Console:
    """A console that wraps no table where the output is no terminal."""
    out = Console(stderr=stderr, highlight=False, markup=False)
    if not out.is_terminal:
        out.width = 116
    return out


def show(rows: Sequence[Row]) -> None:
    """Print the table, the `details` and the `summary`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption=_CAPTION)
    table.caption_justify = "left"
    for header in ("surface", "communicator", "ranks", "error", "bound", "quantity, case", "apart",
                   "allreduce", "verdict"):  # fmt: skip
        justify: Any = "right" if header in ("error", "bound", "apart") else "left"
        # One column wraps in a narrow terminal.
        table.add_column(header, justify=justify, no_wrap=header != "quantity, case")
    for row in ordered(rows):
        table.add_row(*_cells(row), style=_STYLES[row.verdict])
    out = console()
    out.print(table)
    for line in details(rows):
        out.print(line)
    out.print(summary(rows), style="bold red" if exit_status(rows) else "bold green")


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By surface, then communicator, then ranks."""
    return sorted(rows, key=lambda row: (row.surface, row.communicator, row.size))


def details(rows: Sequence[Row]) -> list[str]:
    """A line for each row that is not ok; one line for rows with the same problem."""
    sizes: dict[tuple[str, str, str, str], list[str]] = {}
    for row in ordered(rows):
        if row.verdict != "ok":
            broken = [_in_words(name, o) for name, o in row.outcomes.items() if o.broken]
            key = (row.surface, row.communicator, row.verdict, row.not_run or "; ".join(broken))
            sizes.setdefault(key, []).append(str(row.size))
    return [
        f"{surface}, {communicator}, ranks {', '.join(ranks)}: {verdict}: {text}"
        for (surface, communicator, verdict, text), ranks in sizes.items()
    ]


def summary(rows: Sequence[Row]) -> str:
    """A sentence about all rows."""
    ran = [row for row in rows if row.outcomes]
    cases = max((len(row.outcomes) for row in ran), default=0)
    verdicts = [row.verdict for row in rows]
    return (
        f"{verdicts.count('ok')} of {len(ran)} combinations are within bounds, in {cases} case(s) "
        f"each; {verdicts.count('failed')} failed; {verdicts.count('not run')} could not be run "
        "here."
    )


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write everything to `path`; NaN and infinite errors become null."""
    document = {
        "multibn": multibn.__version__,
        "exit_status": exit_status(rows),
        "summary": summary(rows),
        "expected_messages": {row.size: messages(row.size) for row in rows},
        "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a heat map into the PNG file `path`: combinations by cases, red beyond the bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows = ordered(rows)
    cases = list(dict.fromkeys(name for row in rows for name in row.outcomes)) or [""]
    ratios = [
        [max(row.outcomes[c].worst().ratio, 1e-30) if c in row.outcomes else np.nan for c in cases]
        for row in rows
    ]
    size = 5 + 0.36 * len(cases), 2.8 + 0.36 * len(rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    image = ax.imshow(np.clip(ratios, 1e-4, 1e4), norm=LogNorm(1e-4, 1e4), cmap="RdYlGn_r")
    ax.set_xticks(range(len(cases)), cases, rotation=50, ha="right")
    ax.set_yticks(
        range(len(rows)), [f"{r.surface} · {r.communicator} · {r.size} {r.not_run}" for r in rows]
    )
    ax.set_title(summary(rows), loc="left", fontsize=9)
    figure.colorbar(image, label="largest error / its bound")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def _cells(row: Row) -> list[str]:
    cells = [row.surface, row.communicator, str(row.size)]
    if not row.outcomes:
        return [*cells, *[""] * 5, row.verdict]
    worst = row.worst()
    wrong = [outcome.messages for outcome in row.outcomes.values() if outcome.messages]
    sent = wrong[0][0] if wrong else messages(row.size)
    return [
        *cells,
        f"{worst.error:.0e}",
        f"{row.outcomes[worst.case].bounds[worst.quantity]:.0e}",
        f"{worst.quantity}, {worst.case}",
        f"{row.worst('differences').ratio:.2f}",
        " + ".join(map(str, sent)),
        row.verdict,
    ]


def _in_words(name: str, outcome: Outcome) -> str:
    worst, apart = outcome.worst(), outcome.worst("differences")
    if worst.ratio > 1:
        return f"{name} {worst.error:.0e} in {worst.quantity}"
    if outcome.messages:
        return f"{name} sends {outcome.messages}"
    return f"{name} {apart.error:.0e} from the others in {apart.quantity}"


def _finite(value: Any) -> Any:
    """`value` with None for each number that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
