"""The comparison for people, as a table in the terminal, and for programs, as JSON."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import multibn
from multibn.checkpoint.files import replacing
from multibn.parity.compare import Outcome, Row, exit_status, messages

_STYLES = dict.fromkeys(("failed", "BROKEN"), "bold red")
_STYLES |= {"not run": "dim", "off": "yellow", "ok": "green"}
_WIDTH = 116  # columns of the table, if the output is no terminal


def console(*, stderr: bool = False) -> Console:
    out = Console(stderr=stderr, highlight=False)
    if not out.is_terminal:
        out.width = _WIDTH
    return out


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A status line on stderr; text of several lines is printed above the line, and stays."""
    out = console(stderr=True)
    with out.status("starting") as status:

        def say(text: str) -> None:
            if "\n" in text:
                out.print(text, markup=False)
            else:
                status.update(text)

        yield say


def show(rows: Sequence[Row]) -> None:
    """Print the table, the `details` and the `summary`."""
    out = console()
    out.print(table(rows))
    for line in details(rows):
        out.print(line, markup=False)
    style = "bold green" if exit_status(rows) == 0 else "bold red"
    out.print(summary(rows), style=style, markup=False)


def table(rows: Sequence[Row]) -> Table:
    """One line per combination, in the order of `ordered`."""
    grid = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        caption_justify="left",
        caption="error: the largest one for its bound, relative to the largest expected entry.\n"
        "apart: from the other combinations with as many ranks, in units of the bound.\n"
        "allreduce: numbers in each message of a step, forward + backward.",
    )
    for header in ("surface", "communicator"):
        grid.add_column(header, no_wrap=True)
    for header in ("ranks", "error", "bound"):
        grid.add_column(header, justify="right", no_wrap=True)
    grid.add_column("quantity, case")  # the column that wraps in a narrow terminal
    for header in ("apart", "allreduce", "µs/step"):
        grid.add_column(header, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for _, group in groupby(ordered(rows), key=lambda row: (row.peer, row.surface)):
        for row in group:
            grid.add_row(*_cells(row), style=_STYLES[verdict(row)])
        grid.add_section()
    return grid


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By surface, then communicator, then ranks; the peers come last."""
    return sorted(rows, key=lambda row: (row.peer, row.surface, row.communicator, row.size))


def verdict(row: Row) -> str:
    """The outcome of `row` in a word or two."""
    if row.not_run:
        return "failed" if row.failed else "not run"
    if not row.broken:
        return "ok"
    return "off" if row.peer else "BROKEN"


def details(rows: Sequence[Row]) -> list[str]:
    """A line for each row that is not ok; one line for rows with the same problem."""
    sizes: dict[tuple[str, str, str, str], list[int]] = {}
    for row in ordered(rows):
        if verdict(row) != "ok":
            text = row.not_run or "; ".join(
                _in_words(name, outcome) for name, outcome in row.outcomes.items() if outcome.broken
            )
            key = (row.surface, row.communicator, verdict(row), text)
            sizes.setdefault(key, []).append(row.size)
    return [
        f"{surface}, {communicator}, ranks {', '.join(map(str, ranks))}: {word}: {text}"
        for (surface, communicator, word, text), ranks in sizes.items()
    ]


def summary(rows: Sequence[Row]) -> str:
    """A sentence about all rows but the peers."""
    ours = [row for row in rows if not row.peer]
    ran = [row for row in ours if row.outcomes]
    good = sum(not row.broken for row in ran)
    text = f"{good} of {len(ran)} combinations are within bounds"
    if ran:
        cases = max(len(row.outcomes) for row in ran)
        text += f", in {cases} case{'s' * (cases != 1)} each"
    for label, count in (
        ("failed", sum(row.failed for row in ours)),
        ("could not be run here", sum(bool(row.not_run) and not row.failed for row in ours)),
    ):
        text += f"; {count} {label}" if count else ""
    return f"{text}."


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write everything to `path`; NaN and infinite errors become null."""
    document = {
        "multibn": multibn.__version__,
        "exit_status": exit_status(rows),
        "summary": summary(rows),
        "expected_messages": {row.size: messages(row.size) for row in rows},
        "rows": [_as_dict(row) for row in rows],
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _cells(row: Row) -> list[str]:
    cells = [row.surface, row.communicator, str(row.size)]
    if not row.outcomes:
        return [*cells, *[""] * 6, verdict(row)]
    timed = math.isfinite(row.us_per_step)
    counted = timed and not row.peer
    case, error = row.worst()
    if row.outcomes[case].crash:
        return [*cells, "crash", "", case, "", "", f"{row.us_per_step:.0f}", verdict(row)]
    return [
        *cells,
        error_in_words(row.outcomes[case]),
        f"{row.outcomes[case].bounds[error.quantity]:.0e}".replace("e-0", "e-"),
        f"{error.quantity}, {case}",
        f"{row.worst('difference')[1].ratio:.2f}" if counted else "",
        _messages(row) if counted else "",
        f"{row.us_per_step:.0f}" if timed else "",
        verdict(row),
    ]


def error_in_words(outcome: Outcome) -> str:
    """The worst error in a few characters; "NaN" also for an infinite error."""
    if outcome.crash:
        return "crash"
    error = outcome.error.error
    return "NaN" if math.isinf(error) else f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _in_words(name: str, outcome: Outcome) -> str:
    if outcome.crash:
        return f"{name} {outcome.crash}"
    if outcome.error.ratio > 1:
        return f"{name} {error_in_words(outcome)} in {outcome.error.quantity}"
    if outcome.messages:
        return f"{name} sends {outcome.messages}"
    return f"{name} {outcome.difference.error:.0e} from the others in {outcome.difference.quantity}"


def _messages(row: Row) -> str:
    wrong = [outcome.messages for outcome in row.outcomes.values() if outcome.messages]
    return " + ".join(map(str, wrong[0][0] if wrong else messages(row.size)))


def _as_dict(row: Row) -> dict[str, Any]:
    def finite(errors: dict[str, float]) -> dict[str, float | None]:
        return {name: e if math.isfinite(e) else None for name, e in errors.items()}

    return {
        "surface": row.surface,
        "communicator": row.communicator,
        "ranks": row.size,
        "peer": row.peer,
        "verdict": verdict(row),
        "not_run": row.not_run,
        "broken": row.broken,
        "us_per_step": row.us_per_step if math.isfinite(row.us_per_step) else None,
        "cases": {
            name: {
                "broken": outcome.broken,
                "bounds": outcome.bounds,
                "errors": finite(outcome.errors),
                "differences": finite(outcome.differences),
                "unexpected_messages": outcome.messages,
                "crash": outcome.crash,
            }
            for name, outcome in row.outcomes.items()
        },
    }
