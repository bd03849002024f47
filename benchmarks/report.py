"""The results as tables in the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 124  # of the tables, if the output is no terminal
# Of a comparison, a terminal has the ratio on the wall; the file has these too.
_FILE_ONLY = ("kernels", "rounds", "spread", "processor")


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a part, which have the same columns."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    if rows and "not_run" in rows[0]:
        console.print(f"{name}: not run: {rows[0]['not_run']}\n", markup=False)
        return
    table = Table(title=name, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    cells = [dict(_cells(row)) for row in rows]
    for i, column in enumerate(cells[0] if cells else ()):
        table.add_column(column, justify="right" if i else "left")
    for row in cells:
        table.add_row(*row.values())
    console.print(table)


def _cells(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if name in _FILE_ONLY:
            continue
        if isinstance(value, Mapping):
            yield from _cells(value, f"{prefix}{name}\n")
        elif isinstance(value, list):
            yield prefix + name, "x".join(map(str, value))
        elif isinstance(value, float):
            yield prefix + name, f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
        elif isinstance(value, bool):
            yield prefix + name, "yes" if value else "NO"
        else:
            yield prefix + name, str(value)
