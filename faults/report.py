"""Report the outcomes of faults: in the terminal and in faults/README.md."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown, put
from faults.outcome import Outcome
from faults.scenarios import SCENARIOS
from faults.setups import OURS, PEERS, SETUPS

Results = Mapping[str, Any]


def row(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of an outcome that are stored in faults.json."""
    is_peer = outcome.setup.is_peer
    return {
        "scenario": outcome.scenario.name,
        "setup": outcome.setup.name,
        "seen": outcome.seen[:600],
        "seconds": round(outcome.seconds, 2),
        "verdict": outcome.peer_verdict() if is_peer else outcome.verdict(),
        "complaint": "" if is_peer else outcome.complaint(),
    }


def show(row: Mapping[str, Any]) -> None:
    """Print a line for one fault."""
    result = f"{row['verdict']} {row['seconds']:.2f} s"
    if row["complaint"]:
        result = f"NOT AS IT SHOULD BE: {row['complaint']}"
    print(f"{row['setup']:16} {row['scenario']:16} {result:16} {row['seen'][:90]}", flush=True)


def write(results: Results, page: Path) -> None:
    """Put the tables into faults/README.md."""
    put(page, "each fault", markdown(_COLUMNS, list(_lines(results))))
    put(page, "messages", markdown(("fault", "what the user sees"), _messages(results)))
    rows = [
        (_what(r["scenario"]), r["setup"], f"{r['seconds']:.1f}", _quoted(r["seen"]) or _NO_HARM)
        for r in results.get("two machines", [])
    ]
    put(page, "two machines", markdown(("fault", "over", "seconds", "what the user sees"), rows))
    versions = [f"{k} {v}" for k, v in results["machine"]["versions"].items() if v]
    put(
        page,
        "machine",
        f"Measured with {results['machine']['cores']} cores, {', '.join(versions)}.",
    )


_COLUMNS = ("fault", *(SETUPS[name].title for name in (*OURS, *PEERS)))
_NO_HARM = "nothing; the numbers are right"


def _lines(results: Results) -> Iterable[Sequence[str]]:
    """Yield a table row for each fault, with a verdict for each setup."""
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
    """Yield the message of each fault, and of each setup whose message is different."""
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
    """Quote as code; replace host names and pids, which change from run to run."""
    text = re.sub(r"machine \S+, pid \d+", "machine node1, pid 4711", text)
    text = re.sub(r"pid \d+\)", "pid 4711)", text)
    text = re.sub(r"PID \d+ on node \S+", "PID 4711 on node node1", text)
    text = re.sub(r"^\[\S+:\d+\] ", "", text)
    text = re.sub(r" The transport says: .*", " The transport says: ...", text)
    text = text.replace("`", "'").replace("|", r"\|").strip("- ")
    return f"`{text}`" if text else ""
