"""A row of the table in tests/programs/README.md."""

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.tables import markdown, put
from tests.helpers.launch import ROOT

SAVED = ROOT / "out/programs"  # a file for each row
_COLUMNS = (
    *("program", "what was tried", "result", "largest difference from one process"),
    *("the same, samples in another order", "the same, statistics not shared"),
)
STEPS = 2  # of training
PER_RANK = 4  # samples
BOUND = 1e-9  # the difference from one process that rounding in float64 explains
AMPLIFIED = 10.0  # how far from each other differences may be that a network makes of rounding
NOT_ROUNDING = 1e-6  # a difference from itself that has another reason, such as dropout


@dataclass
class Row:
    """What was tried with a program, and what came of it.

    Attributes
    ----------
    program
        The name of its distribution, by which its version is known.
    difference
        The largest difference of a parameter or buffer, or of what `tried` names, from one process
        with plain batch norm on the whole batch.
    reordered
        The same difference of another run in one process, with the samples in another order.
    local
        The same difference of ranks that do not share statistics.
    complaint
        Why the row fails; "" if it does not.
    """

    program: str
    tried: str
    result: str = ""
    difference: float | None = None
    reordered: float | None = None
    local: float | None = None
    complaint: str = ""

    def judge(self) -> "Row":
        """Complain about a difference that rounding does not explain."""
        reordered = self.reordered or 0.0
        bound = max(BOUND, AMPLIFIED * reordered)
        if not reordered < NOT_ROUNDING:
            self.complaint = f"differs from itself in one process by {reordered:.1e}"
        elif self.difference is not None and not self.difference <= bound:
            self.complaint = f"differs from one process by {self.difference:.1e}"
        elif self.local is not None and not self.local > bound:
            self.complaint = "ranks that do not share statistics do not differ either"
        elif self.difference is not None and self.difference > BOUND:
            self.result += "; the network amplifies rounding as much in one process"
        return self

    def save(self, number: int) -> None:
        """Keep the row for the page, where it has this place."""
        SAVED.mkdir(parents=True, exist_ok=True)
        Path(SAVED, f"{number:03}.json").write_text(json.dumps(asdict(self)))

    def cells(self) -> Sequence[str]:
        numbers = (self.difference, self.reordered, self.local)
        return (
            f"{self.program} {metadata.version(self.program)}",
            self.tried.replace("|", r"\|"),
            f"**fails**: {self.complaint}" if self.complaint else self.result,
            *("-" if number is None else f"{number:.1e}" for number in numbers),
        )


def put_all() -> int:
    """Put all rows that are saved into the page, and return their number."""
    rows = [Row(**json.loads(path.read_text())) for path in sorted(SAVED.glob("*.json"))]
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("multibn", "torch", "numpy")
    )
    about = f"On {time.strftime('%Y-%m-%d')}, with Python {platform.python_version()}, {versions}:"
    table = markdown(_COLUMNS, [row.cells() for row in rows])
    put(ROOT / "tests/programs/README.md", "rows", f"{about}\n\n{table}")
    return len(rows)
