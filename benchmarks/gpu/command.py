"""Checks and times the GPU path on the GPUs of this machine, in three slots of ten minutes each.

Writes gpu.json after each part, and prints what has failed and all times. The exit status is 0 only
if no part has failed, and 2 if something is missing without which every part would fail.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.gpu import parts
from benchmarks.tables import markdown

_SECONDS = 560.0  # ten minutes, less the end of the last part
_OUTPUT, _FAILURES = 4000, 10  # characters of a part, and failed checks, that are shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    said = "; ".join(f"{name}: {slot.says}" for name, slot in parts.SLOTS.items())
    parser.add_argument("--slot", choices=parts.SLOTS, help=said)
    parser.add_argument("--parts", nargs="+", choices=parts.PARTS, metavar="NAME",
                        help="default: those of the slot, or all")  # fmt: skip
    parser.add_argument("--stand-ins", action="store_true",
                        help="on the CPU, with small sizes: that every part runs")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=_SECONDS,
                        help="parts that begin later fail; default: %(default)g")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY",
                        help="where results go")  # fmt: skip
    arguments = parser.parse_args(argv)
    of_slot = parts.SLOTS[arguments.slot].parts if arguments.slot else tuple(parts.PARTS)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "stand_ins": arguments.stand_ins,
        "slot": arguments.slot,
        "parts": [],
    }
    start = time.perf_counter()
    for name in arguments.parts or of_slot:
        left = arguments.seconds - (time.perf_counter() - start)
        part = parts.run(
            name, left, stand_ins=arguments.stand_ins, num_gpus=results["machine"]["gpus"] or 1
        )
        results["parts"].append(part)
        (output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        show(part)
    print(markdown(("part", "status", "s", "checks", "reason"), [
        (part["part"], part["status"], f"{part.get('seconds', 0):.0f}",
         str(sum("check" in row for row in part["rows"])), part["reason"][:80])
        for part in results["parts"]
    ]))  # fmt: skip
    if arguments.stand_ins:
        print("Not run on a GPU: every part ran on stand-ins, and the times mean nothing.")
    return int(any(part["status"] == "failed" for part in results["parts"]))


def show(part: Mapping[str, Any]) -> None:
    """Print how a part ended, which checks have failed, and all else that the part has found."""
    print(part.get("output", "")[-_OUTPUT:], file=sys.stderr, flush=True)
    print(f"{part['part']}: {part['status']} {part['reason']}", flush=True)
    wrong = [row for row in part["rows"] if not row.get("ok", True)]
    for row in wrong[:_FAILURES]:
        print(f"FAILED {row['check']}: error {row['error']:.3g}, bound {row['bound']:.3g}")
    if len(wrong) > _FAILURES:
        print(f"FAILED {len(wrong) - _FAILURES} more")
    if found := [row for row in part["rows"] if "check" not in row]:
        report.show(part["part"], found)
