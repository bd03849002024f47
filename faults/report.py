"""What came of the faults, in the terminal and as docs/faults.md."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from faults.scenarios import DEADLINE, SCENARIOS

Results = Mapping[str, Any]


def _console() -> Console:
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=140)


def show(row: Mapping[str, Any]) -> None:
    """A line for one fault."""
    where = "/".join(str(row[k]) for k in ("over", "framework") if k in row)
    what = row.get("scenario", "")
    said = row["complaint"] and f"NOT AS IT SHOULD BE: {row['complaint']}"
    said = said or row.get("today") or f"{row['seconds']:.2f} s"
    _console().print(f"{where:14} {what:18} {said} {row['seen'][:90]}", markup=False)


def summarize(results: Results) -> None:
    """The table in the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column)
    for line in _lines(results):
        table.add_row(*(cell.replace("[", r"\[") for cell in line))
    _console().print(table)
    complaints = [row for part in results.values() if isinstance(part, list) for row in part
                  if row.get("complaint")]  # fmt: skip
    _console().print(f"{len(complaints)} not as it should be")


def page(results: Results) -> str:
    """docs/faults.md."""
    cells = [[cell.replace("|", r"\|") for cell in line] for line in _lines(results)]
    return _PAGE.format(
        deadline=DEADLINE,
        table=_markdown(_COLUMNS, cells),
        two_hosts=_markdown(
            ("fault", "over", "seconds", "what the user sees"),
            [(r["what"], r["over"], f"{r['seconds']:.1f}", _anonymous(r["seen"]) or "nothing; the numbers are right")
             for r in results.get("two hosts", [])],
        ),
        cost=_markdown(
            ("over", "step, ms", "with bare messages", "ratio, median (95 % interval)",
             "messages alone: more, ms", "of the step"),
            [(r["over"], f"{r['checked_ms']:.1f}", f"{r['bare_ms']:.1f}",
              f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})",
              f"{r['messages_extra_ms']:.2f}", f"{100 * r['messages_extra']:.2f} %")
             for r in results.get("cost", [])],
        ),
        machine=f"{results['machine']['cores']} cores, "
        + ", ".join(f"{k} {v}" for k, v in results["machine"]["versions"].items() if v),
    )  # fmt: skip


_COLUMNS = (
    "fault",
    "what the user sees",
    "seconds to it: torch gloo, MPI; Chainer gloo, MPI",
    "the naive formula on torch.distributed",
    "ChainerMN's link",
)


def _lines(results: Results) -> Iterable[Sequence[str]]:
    ours = {(r["scenario"], r["framework"], r["over"]): r for r in results.get("multibn", [])}
    peers = {(r["scenario"], r["framework"]): r for r in results.get("today", [])}
    for name, chosen in SCENARIOS.items():
        combinations = [(f, o) for f in ("torch", "chainer") for o in ("gloo", "mpi")]
        rows = [ours.get((name, *c)) for c in combinations]
        there = [r for r in rows if r]
        if not there:
            continue
        seen = next((r["seen"] for r in there if r["seen"]), "")
        yield (
            chosen.what
            if not chosen.what.startswith("...")
            else chosen.what.replace("...", "as above,"),
            f"`{_anonymous(seen)}`" if chosen.says else "nothing; the numbers are right",
            ", ".join(_seconds(r) for r in rows),
            peers.get((name, "torch"), {}).get("today", ""),
            peers.get((name, "chainer"), {}).get("today", ""),
        )


def _seconds(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"**{row['complaint']}**" if row["complaint"] else f"{row['seconds']:.2f}"


def _anonymous(text: str) -> str:
    """Without this machine's name and numbers, which change from run to run."""
    text = re.sub(r"host \S+, pid \d+", "host node1, pid 4711", text)
    text = re.sub(r"pid \d+\)", "pid 4711)", text)
    text = re.sub(r"PID \d+ on node \S+", "PID 4711 on node node1", text)
    text = re.sub(r" The transport says: .*", " The transport says: ...", text)
    return text.replace("`", "'").strip("- ")


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# Lines as long as those of the other pages.
# ruff: noqa: E501
_PAGE = """\
# What goes wrong, and what you see of it

Written by `make faults`, which tries each of these on real processes and fails if one is not met as it should be. Three
ranks; rank 1 is at fault. Every message has come from a run; hosts and process numbers are made up. The deadline,
MULTIBN_TIMEOUT, is {deadline:g} s here and 300 s by default: it is what silence takes, the rest is a matter of half a
second. The last two columns are what the same faults do without multibn: "hangs" is no end within 3 s, or 6 s of a
launch that has lost a rank, and none is in sight; "silent wrong numbers" is an exit status of 0.

{table}

`-` does not apply, or was tried in the other framework.

## Two hosts

Two network namespaces of one machine, a rank in each. What takes 5 ms each way is a program between two TUN devices.

{two_hosts}

## What the checks cost

A step of the 53 batch norms of a network like ResNet-50, 2 ranks, beside the same with bare messages: no fingerprints,
deadlines or channels. The two take turns.

{cost}

Measured with {machine}.
"""
