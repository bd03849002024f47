"""Measures the cost of multibn beside the layers that it replaces.

Every result is a ratio: the layers take turns on this machine, with one thread per rank, and a
ratio is the median over the turns. Writes bench.json and pictures.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, parts, plots, report
from multibn.parity.launch import WorkerError

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=parts.PARTS, default=[*parts.PARTS],
                        metavar="NAME",
                        help="default: all; others keep their numbers in bench.json")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes: that every part runs")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY",
                        help="default: benchmarks/results; with --quick, out/bench")  # fmt: skip
    parser.add_argument("--draw", action="store_true", help="only draw the committed results")
    arguments = parser.parse_args(argv)
    if arguments.draw:
        plots.draw(json.loads((RESULTS / "bench.json").read_text()), RESULTS)
        return 0
    output = arguments.output or (Path("out/bench") if arguments.quick else RESULTS)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "bench.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = machine.describe()
    failed = _measure(arguments.parts, parts.QUICK if arguments.quick else parts.FULL, results)
    # Digits beyond the fourth are noise.
    results = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.4g}"))
    path.write_text(json.dumps(results, indent=1) + "\n")
    plots.draw(results, output)
    return int(failed)


def _measure(names: list[str], settings: parts.Settings, results: dict[str, Any]) -> bool:
    """Fill `results` with the parts called `names`; returns whether a part failed."""
    failed = False
    for name in names:
        start = time.perf_counter()
        try:
            results[name] = parts.PARTS[name](settings)
        except WorkerError as error:
            failed = True
            results[name] = [{"not_run": error.reason}]
            print(f"{error}\n{error.output}", file=sys.stderr)
        report.show(name, results[name])
        print(f"{name}: {time.perf_counter() - start:.0f} s\n", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
