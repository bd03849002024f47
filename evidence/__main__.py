"""Run the studies: `python -m evidence [STUDY ...]`; figures and tables."""

import argparse
import importlib
import json
import time
from functools import partial
from typing import Any

import pictures

from benchmarks import worker
from benchmarks.tables import put
from evidence import ROOT

PAGE, PICTURES = ROOT / "evidence/README.md", ROOT / "docs/guides"
RESULTS = ROOT / "evidence/results"
STUDIES = ("skew", "precise", "batch_size", "domains")


def run(name: str, seeds: int) -> list[dict[str, Any]]:
    """The rows that a study's ranks have measured."""
    rows = []
    for size in importlib.import_module(f"evidence.{name}").SIZES:
        (_, notes), *_ = worker.run(
            "evidence.training.measure", "gloo", size, timeout=1200, study=name, seeds=seeds
        )
        rows += notes["rows"]
    return rows


def section(study: Any, results: dict[str, Any]) -> str:
    """How and when the study was run, and its table."""
    command = f"python -m {study.__name__.replace('.', ' ')}"
    date, seconds, rows = (results[name] for name in ("date", "seconds", "rows"))
    seeds = len({row["seed"] for row in rows})
    return f"`{command}` on {date}, {seconds} s, {seeds} seeds:\n\n{study.table(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="evidence", description=__doc__)
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", choices=[*STUDIES, []], help="default: all"
    )
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--draw", action="store_true", help="only draw the committed results")
    arguments = parser.parse_args()
    for name in arguments.studies or STUDIES:
        study = importlib.import_module(f"evidence.{name}")
        path = RESULTS / f"{study.NAME}.json"
        if not arguments.draw:
            start = time.monotonic()
            rows = run(name, arguments.seeds)
            run_on = {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - start)}
            path.write_text(json.dumps(run_on | {"rows": rows}, indent=1) + "\n")
        results = json.loads(path.read_text())
        put(PAGE, study.NAME, section(study, results))
        pictures.save(partial(study.draw, results["rows"]), PICTURES / study.NAME)
        print(f"{section(study, results)}\n", flush=True)


if __name__ == "__main__":
    main()
