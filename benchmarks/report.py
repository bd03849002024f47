"""The results as tables in the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.tables import markdown

# Of a comparison, a terminal has the ratio on the wall; the file has these too.
_FILE_ONLY = ("kernels", "rounds", "processor")


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a part, which have the same columns."""
    if rows and "not_run" in rows[0]:
        print(f"{name}: not run: {rows[0]['not_run']}\n")
        return
    cells = [dict(_cells(row)) for row in rows]
    print(f"{name}\n\n{markdown(list(cells[0]), [list(row.values()) for row in cells])}\n")


def _cells(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if name in _FILE_ONLY:
            continue
        if isinstance(value, Mapping):
            yield from _cells(value, f"{prefix}{name}: ")
        elif isinstance(value, list):
            yield prefix + name, "x".join(map(str, value))
        elif isinstance(value, float):
            yield prefix + name, f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
        else:
            yield prefix + name, str(value)
