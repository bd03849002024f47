"""The table, as docs/programs.md."""

import platform
import time
from collections.abc import Sequence
from importlib import metadata

from benchmarks.tables import markdown
from tests.programs.row import AMPLIFIED, BOUND, NOT_ROUNDING, PER_RANK, STEPS, Row

_COLUMNS = (
    *("program", "what was tried", "result", "largest difference from one process"),
    *("the same, samples in another order", "the same, statistics not shared"),
)
_PACKAGES = ("multibn", "torch", "numpy")


def page(rows: Sequence[Row], seconds: float) -> str:
    """docs/programs.md."""
    failing = sum(bool(row.complaint) for row in rows)
    return _PAGE.format(
        table=markdown(_COLUMNS, map(_line, rows)),
        failing=f"{len(rows)} rows, {failing or 'none'} of them fail{'' if failing else 's'}",
        date=time.strftime("%Y-%m-%d"),
        versions=", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        python=platform.python_version(),
        minutes=f"{seconds / 60:.0f}",
        steps=STEPS,
        samples=PER_RANK,
        bound=BOUND,
        amplified=AMPLIFIED,
        not_rounding=NOT_ROUNDING,
    )


def _line(row: Row) -> Sequence[str]:
    numbers = (row.difference, row.reordered, row.local)
    result = f"**fails**: {row.complaint}" if row.complaint else row.result
    return (
        f"{row.program} {metadata.version(row.program)}",
        row.tried.replace("|", r"\|"),
        result.replace("|", r"\|"),
        *("-" if number is None else f"{number:.1e}" for number in numbers),
    )


# Lines as long as those of the other pages.
# ruff: noqa: E501
_PAGE = """\
# Other people's programs

Written by `make programs` on {date} in {minutes} minutes, with Python {python}, {versions}, on 2 ranks over gloo: {failing}.

{table}

"steps": a model of the program's own, in float64 without dropout, is trained by SGD with {samples} samples on each rank. Ranks
train under `DistributedDataParallel` after `convert_sync_batchnorm(model, strict=True)`. One process trains the model as
it was on the samples of both ranks together. The table has the largest difference of any parameter or buffer after
the last step.

- "samples in another order" is one process against one process, both plain: what a network makes of rounding alone.
  A row passes with a difference up to {bound:g}, or up to {amplified:g} times this one, which must be below {not_rounding:g}.
- "statistics not shared" is the two ranks without conversion. A row fails if they are right as well.

"found": a rule of the program looks for layers of certain classes, or a tool describes or translates the model. It has
to find in a converted model what it finds in the model as it was, by name and in the same order. The difference is the
largest of the numbers that follow, such as fvcore's statistics, the output of a frozen model after a training step, or
of a translated model.

Run a part by `.venv/programs/bin/python -m tests.programs --only timm`.
"""
