"""Checks and times the GPU path on the GPUs of this machine, in under ten minutes.

Each part runs in processes of its own. Writes gpu.json after each part, and gpu.md and gpu.png at
the end. The exit status is 0 only if no part has failed.
"""

import argparse
import datetime
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gpu import parts

_SECONDS = 560.0  # ten minutes, less the end of the last part and the figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(parts.PARTS), metavar="NAME,...",
                        help="default: all")  # fmt: skip
    parser.add_argument("--stand-ins", action="store_true",
                        help="on the CPU, with small sizes: that every part runs")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=_SECONDS,
                        help="parts that begin later fail; default: %(default)g")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("out/gpu"), metavar="DIRECTORY",
                        help="default: %(default)s")  # fmt: skip
    arguments = parser.parse_args(argv)
    names = arguments.parts.split(",")
    if unknown := set(names) - set(parts.PARTS):
        parser.error(f"--parts must be of {', '.join(parts.PARTS)}: got {', '.join(unknown)}")
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "stand_ins": arguments.stand_ins,
        "parts": [],
    }
    _measure(names, arguments.seconds, results, output / "gpu.json")
    failed = any(part["status"] in ("failed", "timed out") for part in results["parts"])
    try:
        from benchmarks.gpu import report

        report.write(results, output)
    except Exception:  # of a library of tables or figures; the numbers are in gpu.json
        traceback.print_exc()
        failed = True
    return int(failed)


def _measure(names: Sequence[str], seconds: float, results: dict[str, Any], path: Path) -> None:
    """Run the parts, and write the results after each."""
    start = time.perf_counter()
    num_gpus = results["machine"]["gpus"] or 1
    for name in names:
        left = seconds - (time.perf_counter() - start)
        if left > 0:
            part = parts.run(name, left, stand_ins=results["stand_ins"], num_gpus=num_gpus)
        else:
            reason = f"no time was left after {seconds:g} s"
            part = {"part": name, "status": "failed", "reason": reason, "rows": []}
        results["parts"].append(part)
        results["seconds"] = time.perf_counter() - start
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {part['status']}, {part.get('seconds', 0):.0f} s"
              f"{': ' + part['reason'] if 'reason' in part else ''}", flush=True)  # fmt: skip
        if part.get("output"):
            print(part["output"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
