"""The comparison for people, as a table in the terminal, and for programs."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import multibn
from multibn.checkpoint.files import replacing
from multibn.parity.compare import Row, exit_status

_STYLES = {"failed": "bold red", "BROKEN": "bold red", "not run": "dim", "ok": "green"}
_CAPTION = "error: the largest one for its bound, relative to the largest expected entry"


def console(*, stderr: bool = False) -> Console:
    """A console that wraps no table where the output is no terminal."""
    out = Console(stderr=stderr, highlight=False, markup=False)
    if not out.is_terminal:
        out.width = 116
    return out


def show(rows: Sequence[Row]) -> None:
    """Print the table, which fits 80 columns, the `details` and the `summary`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption=_CAPTION)
    table.caption_justify = "left"
    for header in ("communicator", "ranks", "error", "quantity, case", "verdict"):
        # One column wraps, if a user's own names are long.
        justify: Any = "right" if header in ("ranks", "error") else "left"
        table.add_column(header, justify=justify, no_wrap=header != "quantity, case")
    surface = ""
    for row in ordered(rows):
        if row.surface != surface:
            surface = row.surface
            table.add_row(surface, style="bold")
        worst = row.worst
        cells = (
            [f"{worst.error:.0e}", f"{worst.quantity}, {worst.case}"] if row.errors else ["", ""]
        )
        place = [f"  {row.communicator}", str(row.size)]
        table.add_row(*place, *cells, row.verdict, style=_STYLES[row.verdict])
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
            broken = {
                e.case: f"{e.case} {e.error:.0e} in {e.quantity}, bound {e.bound:.0e}"
                for e in sorted(row.errors)
                if e.ratio > 1
            }  # the worst of each case
            text = row.not_run or "; ".join(broken.values())
            key = (row.surface, row.communicator, row.verdict, text)
            sizes.setdefault(key, []).append(str(row.size))
    return [
        f"{surface}, {communicator}, ranks {', '.join(ranks)}: {verdict}: {text}"
        for (surface, communicator, verdict, text), ranks in sizes.items()
    ]


def summary(rows: Sequence[Row]) -> str:
    """A sentence about all rows."""
    ran = [row for row in rows if row.errors]
    cases = max((len({error.case for error in row.errors}) for row in ran), default=0)
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
        "rows": [
            vars(row) | {
                "verdict": row.verdict,
                "errors": [
                    {"case": e.case, "quantity": e.quantity, "bound": e.bound,
                     "error": e.error if math.isfinite(e.error) else None}
                    for e in row.errors
                ],
            }
            for row in rows
        ],
    }  # fmt: skip
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1) + "\n")
