"""What came of the faults, in the terminal and as docs/faults.md."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.tables import markdown
from faults.scenarios import DEADLINE, SCENARIOS
from faults.setups import OURS, PEERS, SETUPS

Results = Mapping[str, Any]


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def show(row: Mapping[str, Any]) -> None:
    """A line for one fault."""
    what = row.get("scenario", "")
    result = f"{row.get('verdict', '')} {row['seconds']:.2f} s"
    if row["complaint"]:
        result = f"NOT AS IT SHOULD BE: {row['complaint']}"
    line = f"{row['setup']:16} {what:16} {result:16} {row['seen'][:90]}"
    _console().print(line, markup=False)


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
    lines = list(_lines(results))
    return _PAGE.format(
        deadline=DEADLINE,
        table=markdown(_COLUMNS, lines),
        messages=markdown(("fault", "what the user sees"), _messages(results)),
        two_machines=markdown(
            ("fault", "over", "seconds", "what the user sees"),
            [(r["what"], r["setup"], f"{r['seconds']:.1f}", _quoted(r["seen"]) or _NO_HARM)
             for r in results.get("two machines", [])],
        ),
        machine=f"{results['machine']['cores']} cores, "
        + ", ".join(f"{k} {v}" for k, v in results["machine"]["versions"].items() if v),
    )  # fmt: skip


_COLUMNS = ("fault", *(SETUPS[name].title for name in (*OURS, *PEERS)))
_NO_HARM = "nothing; the numbers are right"


def _lines(results: Results) -> Iterable[Sequence[str]]:
    """A line for each fault, with a verdict for each setup."""
    rows = {(r["scenario"], r["setup"]): r for part in ("multibn", "peers")
            for r in results.get(part, [])}  # fmt: skip
    for name in SCENARIOS:
        cells = [_verdict(rows.get((name, setup))) for setup in (*OURS, *PEERS)]
        if any(cell != "-" for cell in cells):
            yield _what(name), *cells


def _verdict(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["complaint"]:
        return f"**{row['complaint']}**".replace("|", r"\|")
    seconds = f"{row['seconds']:.2f} s"
    words = {"named": seconds, "deadline": f"deadline, {seconds}"}
    return words.get(row["verdict"], row["verdict"])


def _messages(results: Results) -> Iterable[Sequence[str]]:
    """What the user sees of each fault: once if the words are the same in all setups."""
    for name, chosen in SCENARIOS.items():
        rows = [r for r in results.get("multibn", []) if r["scenario"] == name]
        if not rows or not chosen.says:
            continue
        rows = [r for r in rows if not r["complaint"] and r["verdict"] != "waits"]
        yield _what(name), _quoted(next((r["seen"] for r in rows), ""))
        for row in rows:
            if row["setup"] in chosen.says_under | chosen.others_say:
                yield f"... {SETUPS[row['setup']].title}", _quoted(row["seen"])


def _what(name: str) -> str:
    what = SCENARIOS[name].what
    return what.replace("...", "as above,") if what.startswith("...") else what


def _quoted(text: str) -> str:
    """As code, without this machine's name and numbers, which change from run to run."""
    text = re.sub(r"machine \S+, pid \d+", "machine node1, pid 4711", text)
    text = re.sub(r"pid \d+\)", "pid 4711)", text)
    text = re.sub(r"PID \d+ on node \S+", "PID 4711 on node node1", text)
    text = re.sub(r"^\[\S+:\d+\] ", "", text)
    text = re.sub(r" The transport says: .*", " The transport says: ...", text)
    text = text.replace("`", "'").replace("|", r"\|").strip("- ")
    return f"`{text}`" if text else ""


# Lines as long as those of the other pages.
# ruff: noqa: E501
_PAGE = """\
# What goes wrong, and what you see of it

Written by `make faults`, which tries each of these faults on real processes and fails if one is not met as it should
be. There are three ranks; rank 1 is at fault. The deadline, MULTIBN_TIMEOUT, is {deadline:g} s here, and 300 s by default.

## What is promised

| over | names, sizes and versions are compared first | each message tells if it is of another layer | silence ends at the deadline | a rank that leaves or fails tells the others | a rank is killed |
| --- | --- | --- | --- | --- | --- |
| gloo, ranks of one machine: shared memory | yes | yes | yes | yes | `ConnectionError` with its rank and layer |
| gloo, ranks of several machines | yes | yes | yes | yes | `ConnectionError` with its rank and layer |
| shared memory, under DistributedDataParallel | yes, after DistributedDataParallel has compared the parameters | yes | yes, but between the last layer's backward pass and the end of the step; with `register_allreduce_hook` there too | yes, as the deadline | `ConnectionError` with its rank and layer, as the deadline |
| MPI; ChainerMN, arrays in host memory | yes | yes | yes; in the first message it names all ranks that it has not heard of | yes | `mpiexec` ends all ranks, and names the rank and the signal |
| a class of the user's own; ChainerMN's with another `allreduce` | yes | yes | no | no | what its transport does: under `mpiexec` as above |
| CUDA tensors over gloo | as gloo | as gloo | as gloo | as gloo | as gloo |
| CUDA tensors over NCCL | yes, with the deadline | yes, one call late | no: torch's watchdog, the group's timeout | no | torch's watchdog |
| GPU arrays over pure_nccl, or MPI that is CUDA-aware | yes, over the communicator for host memory | yes, one call late | no | no | the launcher's words |

All rows but the last three are tried below.

## Each fault

{table}

The first six columns are multibn's: README's recipe for torch; the same where the ranks share no memory, as on several
machines; the same with DistributedDataParallel (DDP); README's recipes for torch over MPI and for Chainer; and a
communicator of ten lines over `comm.Allreduce` of mpi4py. The last two are the same faults without multibn.

- Seconds: how long after the fault every rank has raised an error that names the fault.
- deadline: the same, when the deadline had passed.
- right: the fault does no harm, and the numbers are those of one process with all the data.
- launcher, DDP: torchrun, `mpiexec`, MPI or DistributedDataParallel sees the fault before the other ranks can, and its
  words are what the user sees.
- waits: the other ranks wait for ever, because the transport has no deadline and no notices.
- `-`: does not apply, or is as over shared memory (DDP), as over MPI (ChainerMN), or as in the line above (the last two
  columns).
- Of the last two columns, hangs: no end within 3 s, or 6 s of a launch that has lost a rank. Silent wrong numbers: exit
  status 0.

Where an error of multibn's ends the program, the line `multibn: ` with its message is the first and the last line that
the rank prints after the fault, which is checked here under each launcher. A launcher prints more lines after it.

## What the user sees

Machines and process numbers are made up. The words are the same in all columns, unless they are listed.

{messages}

## Two machines

Two network namespaces of one machine, a rank in each. A program between two TUN devices makes the delay of 5 ms each way.

{two_machines}

Measured with {machine}.
"""
