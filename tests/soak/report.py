"""The tables of docs/soak.md, from the results of the runs."""

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from tests.soak.deeds import Row
from tests.soak.held import COLUMNS

_DEEDS = ("transport", "ranks", "deed", "turns", *COLUMNS)
_WIDTHS = ("transport", "ranks", "alone", "1", "40", "200", "threads", "MPI communicators")
_STARTS = ("stage", "s until the last rank", "processor s of a rank")


def cells(transport: str, ranks: int, row: Row) -> list[str]:
    """A deed's line of the table."""
    held = [
        f"{b:.1f} → {a:.1f}" if name == "MB" else f"{b:.0f} → {a:.0f}"
        for name, b, a in zip(COLUMNS, row.before, row.after, strict=True)
    ]
    return [*map(str, (transport, ranks, row.deed, row.turns)), *held]


def write(
    page: Path, runs: Mapping[tuple[str, int], Any], figures: Mapping[str, Any], seconds: float
) -> None:
    """Put the tables into the page; `runs` by transport and number of ranks."""
    deeds = [cells(*key, row) for key, results in runs.items() for row in results["rows"]]
    text = _replaced(page.read_text(), _DEEDS, deeds)
    text = _replaced(text, _WIDTHS, _widths(runs))
    if figures:
        stages = [
            [stage, f"{last:.1f}", "" if mean is None else f"{mean:.2f}"]
            for stage, (last, mean) in figures.items()
        ]
        text = _replaced(text, _STARTS, stages)
        cores = len(os.sched_getaffinity(0))
        text = re.sub(r"over MPI on \d+ cores", f"over MPI on {cores} cores", text)
    run = f"Python {platform.python_version()}, {seconds:.0f} s in all."
    page.write_text(re.sub(r"Python \S+, \d+ s in all\.", run, text))


def _replaced(text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`text`, whose table of these columns has other rows."""
    head = re.escape(markdown(columns, ()))
    text, found = re.subn(rf"{head}(\n\|.*)*", lambda _: markdown(columns, rows), text)
    assert found == 1, f"the page has {found} tables of {columns}"
    return text


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
