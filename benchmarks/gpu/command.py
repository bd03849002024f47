"""Checks and times the GPU path on the GPUs of this machine, in three slots of ten minutes each.

Writes gpu.json after each part, and gpu.md at the end. The exit status is 0 only if no part has
failed, and 2 if something is missing without which every part would fail.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gpu import parts
from benchmarks.tables import markdown
from benchmarks.timing import geometric_mean

_SECONDS = 560.0  # ten minutes, less the end of the last part
OURS, PEER, LOCAL = "multibn", "nn.SyncBatchNorm", "nn.BatchNorm"
_OUTPUT, _FAILURES = 4000, 10  # characters of a part, and failed checks, that are shown
_LAYER = "a layer's step on the GPU"
Row = Mapping[str, Any]


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
        print(f"{name}: {part['status']} {part['reason']}", flush=True)
        print(part.get("output", "")[-_OUTPUT:], file=sys.stderr, flush=True)
    text = "\n\n".join(_page(results)) + "\n"
    (output / "gpu.md").write_text(text)
    print(text)
    return int(any(part["status"] == "failed" for part in results["parts"]))


def goals(results: Row) -> list[Row]:
    """What the times are judged by, as far as there are times: {what, value, bound, met}."""
    judged: list[Row] = []

    def judge(what: str, bound: float, values: Sequence[float], pick: Any = max) -> None:
        if values and not results["stand_ins"]:
            value = float(pick(values))
            judged.append({"what": what, "value": value, "bound": bound, "met": value <= bound})

    rows = _times(results)
    steps = [row for row in rows if row["time"] == _LAYER]
    judge("GPU time / nn.SyncBatchNorm's, geometric mean", 0.8,
          [_ratio(row) for row in steps], geometric_mean)  # fmt: skip
    judge("GPU time / eight passes at a copy's speed, sizes that fill the GPU, worst", 1.25,
          [_ratio(row, "eight passes") for row in steps if row["fills"]])  # fmt: skip
    judge("host time / nn.SyncBatchNorm's, worst", 1.3,
          [_ratio(row) for row in rows if row["time"].startswith("host")])  # fmt: skip
    judge("ResNet-50's step / with nn.SyncBatchNorm", 0.95,
          [_ratio(row) for row in rows if row["time"].startswith("ResNet")])  # fmt: skip
    return judged


def _times(results: Row) -> list[Row]:
    return [row for part in results["parts"] for row in part["rows"] if "time" in row]


def _ratio(row: Row, other: str = PEER) -> float:
    return float(row["microseconds"][OURS] / row["microseconds"][other])


def _page(results: Row) -> Iterator[str]:
    """The machine, how each part ended, what was judged, and all times."""
    yield "# The GPU path, checked and timed"
    if results["stand_ins"]:
        yield "**Not run on a GPU: every part ran on stand-ins, and the times mean nothing.**"
    rows = [row for part in results["parts"] for row in part["rows"]]
    facts = {"Python": results["machine"]["python"], **results["machine"]["versions"]}
    facts |= {row["fact"]: row["value"] for row in rows if "fact" in row}
    yield f"{results['date']}. " + ", ".join(f"{k} {v}" for k, v in facts.items() if v)
    yield markdown(("part", "status", "s", "checks", "reason"), [
        (part["part"], part["status"], f"{part.get('seconds', 0):.0f}",
         str(sum("check" in row for row in part["rows"])),
         part["reason"][:80].replace("|", "/"))
        for part in results["parts"]
    ])  # fmt: skip
    if results["slot"]:
        yield f"Slot {results['slot']}: {parts.SLOTS[results['slot']].says}."
    wrong = [row for row in rows if not row.get("ok", True)]
    for row in wrong[:_FAILURES]:
        yield f"FAILED {row['check']}: error {row['error']:.3g}, bound {row['bound']:.3g}"
    if len(wrong) > _FAILURES:
        yield f"FAILED {len(wrong) - _FAILURES} more"
    for goal in goals(results):
        met = "met" if goal["met"] else "NOT MET"
        yield f"{goal['what']}: {goal['value']:.2f}, at most {goal['bound']:.2f}: {met}"
    names = (OURS, PEER, LOCAL)
    yield ("A time on the GPU is that of a CUDA graph's replay. A replay leaves out multibn's two "
           "copies of messages to the host, and the peer's three waits; times of the host have "
           "both, and the stand-in for a second rank, one launch each way.")  # fmt: skip
    yield markdown(
        ("microseconds", *names, f"/ {PEER}", f"/ {LOCAL}", "/ 8 passes"),
        [(f"{row['time']}: {'x'.join(map(str, row['shape']))} {row['dtype']} {row['layout']}",
          *(f"{row['microseconds'][name]:.1f}" for name in names),
          *(f"{_ratio(row, name):.2f}" for name in names[1:]),
          f"{_ratio(row, 'eight passes'):.2f}" if row["time"] == _LAYER else "")
         for row in _times(results)],
    )  # fmt: skip
    swept = sorted((r["us"], r["setting"]) for r in rows if "setting" in r)
    yield markdown(("microseconds", "setting"), [(f"{us:.1f}", text) for us, text in swept])
