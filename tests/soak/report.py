"""The tables of docs/soak.md, from the results of the runs."""

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown, put
from tests.soak.deeds import Row
from tests.soak.held import COLUMNS

_WIDTHS = ("transport", "ranks", "alone", "1", "40", "200", "threads", "MPI communicators")


def cells(transport: str, ranks: int, row: Row) -> list[str]:
    """A deed's line of the table."""
    held = [
        f"{b:.1f} → {a:.1f}" if name == "MB" else f"{b:.0f} → {a:.0f}"
        for name, b, a in zip(COLUMNS, row.before, row.after, strict=True)
    ]
    return [*map(str, (transport, ranks, row.deed, row.turns)), *held]


def write(page: Path, runs: Mapping[tuple[str, int], Any], seconds: float) -> None:
    """Put the tables into the page; `runs` by transport and number of ranks."""
    deeds = [cells(*key, row) for key, results in runs.items() for row in results["rows"]]
    put(page, "deeds", markdown(("transport", "ranks", "deed", "turns", *COLUMNS), deeds))
    put(page, "widths", markdown(_WIDTHS, _widths(runs)))
    put(page, "run", f"Python {platform.python_version()}, {seconds:.0f} s in all.")


def _widths(runs: Mapping[tuple[str, int], Any]) -> Iterable[list[str]]:
    for (transport, ranks), results in runs.items():
        if "widths" not in results:
            continue
        held = results["widths"]
        columns = [[held[when][i] for when in ("alone", "1", "40", "200")] for i in range(3)]
        descriptors, threads, duplicates = columns
        if transport == "gloo" and descriptors[-1] - descriptors[0] > ranks - 1:
            raise AssertionError(f"{ranks} ranks: more than one connection each: {descriptors}")
        cells = (transport, ranks, *descriptors)
        yield [*map(str, cells), *(f"{c[0]} / {c[-1]}" for c in (threads, duplicates))]
