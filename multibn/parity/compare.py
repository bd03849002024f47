"""Errors of the workers' results against the oracle and each other, and their verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from multibn import message
from multibn._launch import Written
from multibn.parity import oracle
from multibn.parity.cases import CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array

# One rank's arrays by "step/quantity"; gradients of weight and bias are means over the ranks.
Arrays = dict[str, Array]


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


def messages(size: int) -> list[int]:
    """The lengths of a training step's messages: an allreduce forward and one backward."""
    return [message.length(CHANNELS)] * 2 if size > 1 else []


class Worst(NamedTuple):
    """The error that comes closest to its bound, or exceeds it most."""

    ratio: float = 0.0
    error: float = 0.0
    quantity: str = ""
    case: str = ""


@dataclass
class Outcome:
    """The result of one case. Errors are relative to the largest entry; NaN counts as infinite."""

    bounds: dict[str, float]  # by quantity, the largest error allowed
    errors: dict[str, float]  # from the oracle
    # From the other combinations with the same number of ranks.
    differences: dict[str, float] = field(default_factory=dict)
    # Messages of each step and of the evaluation, if other than expected.
    messages: list[list[int]] = field(default_factory=list)

    def worst(self, what: str = "errors") -> Worst:
        """The worst of the `"errors"` or `"differences"`."""
        ratios = [Worst(e / self.bounds[n], e, n) for n, e in getattr(self, what).items()]
        return max(ratios, default=Worst())

    @property
    def broken(self) -> bool:
        """Whether a bound is broken, or the messages are not the expected ones."""
        ratio = max(self.worst().ratio, self.worst("differences").ratio)
        return ratio > 1 or bool(self.messages)


@dataclass
class Row:
    """A combination of a surface, a communicator and a number of ranks, with its outcomes."""

    surface: str
    communicator: str
    size: int
    not_run: str = ""  # why the row has no results
    failed: bool = False  # the workers failed
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by case

    @property
    def verdict(self) -> str:
        """The outcome in a word or two."""
        if self.not_run:
            return "failed" if self.failed else "not run"
        return "BROKEN" if any(outcome.broken for outcome in self.outcomes.values()) else "ok"

    def worst(self, what: str = "errors") -> Worst:
        """The worst of the cases' `"errors"` or `"differences"`."""
        worst = [o.worst(what)._replace(case=name) for name, o in self.outcomes.items()]
        return max(worst, default=Worst())


def exit_status(rows: Sequence[Row]) -> int:
    """0 for success, 1 if a bound is broken, 2 if workers failed or nothing was run."""
    verdicts = {row.verdict for row in rows}
    return 1 if "BROKEN" in verdicts else 2 if "failed" in verdicts or "ok" not in verdicts else 0


def compare(rows: Sequence[Row], results: Sequence[Sequence[Written]], case: Case) -> None:
    """Set the outcomes of `case` by comparison with the oracle and each other.

    All `rows` have the same number of ranks; `results` holds each row's list of ranks' results.
    """
    want = expected(case, rows[0].size)
    got = []
    for row, ranks in zip(rows, results, strict=True):
        key = f"{row.surface}/{row.communicator}/{case.name}"
        got.append([{name: w.arrays[f"{key}/{name}"] for name in want[0]} for w in ranks])
        errors = largest(got[-1], want, want)
        sent = [written.notes[key] for written in ranks]
        wrong = [s for s in sent if s != [messages(row.size)] * case.steps + [[]]]
        bounds = {name: case.bound(name) for name in errors}
        row.outcomes[case.name] = Outcome(bounds, errors, messages=next(iter(wrong), []))
    # The largest difference from any other value is that from the minimum or the maximum of all.
    for ufunc in (np.minimum, np.maximum):
        extreme = [
            {key: ufunc.reduce([of_row[rank][key] for of_row in got]) for key in arrays}
            for rank, arrays in enumerate(want)
        ]
        for row, of_row in zip(rows, got, strict=True):
            differences = row.outcomes[case.name].differences
            for name, value in largest(of_row, extreme, want).items():
                differences[name] = max(differences.get(name, 0.0), value)


def largest(
    got: Sequence[Arrays], want: Sequence[Arrays], scale: Sequence[Arrays]
) -> dict[str, float]:
    """By quantity, the largest error over ranks and steps, relative to the entries of `scale`."""
    errors: dict[str, float] = {}
    for have, wanted, scales in zip(got, want, scale, strict=True):
        for key, array in wanted.items():
            quantity = key.rpartition("/")[2]
            error = oracle.relative_error(have[key], array, scales[key])
            errors[quantity] = max(errors.get(quantity, 0.0), error)
    return errors
