"""Errors of the workers' results against the oracle, and their verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from multibn._launch import Written
from multibn.parity import oracle
from multibn.parity.cases import CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array

# One rank's arrays by "step/quantity"; gradients of weight and bias are means over the ranks.
Arrays = dict[str, Array]


@lru_cache(1)  # the rows of a launch, case by case
def expected(case: Case, size: int) -> list[Arrays]:
    """The right arrays of each of `size` ranks in every step of `case`."""
    results: list[Arrays] = [{} for _ in range(size)]
    running = [(np.zeros(CHANNELS), np.ones(CHANNELS))] * size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        whole = oracle.batch_norm(
            xs, dys, *case.parameters(), eps=EPS, weighting=case.weighting, masks=masks
        )
        for rank, arrays in enumerate(results):
            count = masks[rank].sum() if case.running_var == "unbiased_local" else whole.count
            factor = 1.0 if case.running_var == "biased" else count / max(count - 1, 1)
            momentum = 1 / (step + 1) if case.cumulative else MOMENTUM
            running[rank] = oracle.running(running[rank], whole.mean, whole.var, factor, momentum)
            arrays |= {
                f"{step}/y": whole.y[rank],
                f"{step}/dx": whole.dx[rank],
                f"{step}/dweight": whole.dweight / size,
                f"{step}/dbias": whole.dbias / size,
                f"{step}/running_mean": running[rank][0],
                f"{step}/running_var": running[rank][1],
            }
    for rank, arrays in enumerate(results):
        arrays[f"{step}/eval"] = oracle.normalize(
            xs[rank], *running[rank], *case.parameters(), eps=EPS, mask=masks[rank]
        )
    return results


class Error(NamedTuple):
    """The largest error of a quantity, over ranks and steps; NaN counts as infinite."""

    ratio: float = 0.0  # of the error to its bound
    error: float = 0.0  # relative to the largest expected entry
    bound: float = 1.0
    quantity: str = ""
    case: str = ""


@dataclass
class Row:
    """A combination of a surface, a communicator and a number of ranks, with its errors."""

    surface: str
    communicator: str
    size: int
    not_run: str = ""  # why the row has no results
    failed: bool = False  # the workers failed
    errors: list[Error] = field(default_factory=list)

    def add(self, case: str, quantity: str, error: float, bound: float) -> None:
        """Add an error, for which `bound` is the largest that is allowed."""
        self.errors.append(Error(error / bound, error, bound, quantity, case))

    @property
    def worst(self) -> Error:
        """The error that comes closest to its bound, or exceeds it most."""
        return max(self.errors, default=Error())

    @property
    def verdict(self) -> str:
        """The outcome in a word or two."""
        if self.not_run:
            return "failed" if self.failed else "not run"
        return "BROKEN" if self.worst.ratio > 1 else "ok"


def exit_status(rows: Sequence[Row]) -> int:
    """0 for success, 1 if a bound is broken, 2 if workers failed or nothing was run."""
    verdicts = {row.verdict for row in rows}
    return 1 if "BROKEN" in verdicts else 2 if "failed" in verdicts or "ok" not in verdicts else 0


def compare(row: Row, ranks: Sequence[Written], case: Case) -> None:
    """Add the errors of `case` to `row`, from the results of its ranks."""
    key = f"{row.surface}/{row.communicator}/{case.name}/"
    got = [
        {k.removeprefix(key): a for k, a in rank.arrays.items() if k.startswith(key)}
        for rank in ranks
    ]
    for quantity, error in largest(got, expected(case, row.size)).items():
        row.add(case.name, quantity, error, case.bound(quantity))


def largest(got: Sequence[Arrays], want: Sequence[Arrays]) -> dict[str, float]:
    """By quantity, the largest error over ranks and steps."""
    errors: dict[str, float] = {}
    for have, wanted in zip(got, want, strict=True):
        for key, array in wanted.items():
            quantity = key.rpartition("/")[2]
            error = oracle.relative_error(have[key], array)
            errors[quantity] = max(errors.get(quantity, 0.0), error)
    return errors
