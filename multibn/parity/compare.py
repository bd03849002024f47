"""Errors of the workers' results against the oracle and each other, and their verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from multibn import message
from multibn._launch import Written
from multibn.parity import oracle
from multibn.parity.cases import CHANNELS, Case, NDArrayAny
from multibn.parity.oracle import Arrays
from multibn.parity.peers import PEERS


def messages(num_ranks: int) -> list[int]:
    """The lengths of a training step's messages: an allreduce forward and one backward."""
    return [message.length(CHANNELS)] * 2 if num_ranks > 1 else []


class Worst(NamedTuple):
    """The error that comes closest to its bound, or exceeds it most."""

    ratio: float
    error: float
    quantity: str


@dataclass
class Outcome:
    """The result of one case. Errors are relative to the largest entry; NaN counts as infinite."""

    bounds: dict[str, float]  # by quantity, the largest error allowed
    errors: dict[str, float]  # from the oracle
    # From the other combinations with the same number of ranks; empty for peers.
    differences: dict[str, float] = field(default_factory=dict)
    # Messages of each step and of the evaluation, if other than expected.
    messages: list[list[int]] = field(default_factory=list)
    crash: str = ""  # why a peer has no numbers; its errors are infinite

    @property
    def error(self) -> Worst:
        """The worst of the errors."""
        return self._worst(self.errors)

    @property
    def difference(self) -> Worst:
        """The worst of the differences."""
        return self._worst(self.differences)

    @property
    def broken(self) -> bool:
        """Whether a bound is broken, or the messages are not the expected ones."""
        return max(self.error.ratio, self.difference.ratio) > 1 or bool(self.messages)

    def _worst(self, errors: dict[str, float]) -> Worst:
        ratios = [Worst(e / self.bounds[name], e, name) for name, e in errors.items()]
        return max(ratios, default=Worst(0.0, 0.0, ""))


@dataclass
class Row:
    """A combination of a surface, a communicator and a number of ranks, with its outcomes."""

    surface: str
    communicator: str
    size: int
    peer: bool = False  # another library's surface: its errors are shown but do not count
    not_run: str = ""  # why the row has no results
    failed: bool = False  # the workers failed
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by case
    us_per_step: float = math.nan  # microseconds per training step: median over steps and ranks

    @property
    def broken(self) -> bool:
        """Whether any outcome is broken."""
        return any(outcome.broken for outcome in self.outcomes.values())

    def worst(self, what: str = "error") -> tuple[str, Worst]:
        """The case with the worst `"error"` or `"difference"`, and this worst value."""
        by_case = {name: getattr(outcome, what) for name, outcome in self.outcomes.items()}
        return max(by_case.items(), key=lambda item: item[1].ratio)


def exit_status(rows: Sequence[Row]) -> int:
    """0 for success, 1 if a bound is broken, 2 if workers failed or nothing was run."""
    ours = [row for row in rows if not row.peer]
    if any(row.broken for row in ours):
        return 1
    ran = [row for row in ours if not row.not_run]
    return 2 if not ran or any(row.failed for row in ours) else 0


def compare(rows: Sequence[Row], results: Sequence[Sequence[Written]], case: Case) -> None:
    """Set the outcomes of `case` by comparison with the oracle and, but for peers, each other.

    All `rows` have the same number of ranks; `results` holds each row's list of ranks' results.
    """
    averaged = [_averaged(row, ranks, case) for row, ranks in zip(rows, results, strict=True)]
    for row, ranks, got in zip(rows, results, averaged, strict=True):
        convention = PEERS[row.surface].running_var if row.surface in PEERS else None
        expected = oracle.train(case, row.size, running_var=convention)
        errors = _largest(got, expected, expected)
        outcome = Outcome({name: case.bound(name) for name in errors}, errors)
        if not row.peer:
            outcome.messages = _unexpected(row, ranks, case)
        row.outcomes[case.name] = outcome
    ours = [(row, got) for row, got in zip(rows, averaged, strict=True) if not row.peer]
    if len(ours) < 2:
        return
    expected = oracle.train(case, rows[0].size)
    # The largest difference from any other value is that from the minimum or the maximum of all.
    for ufunc in (np.minimum, np.maximum):
        extreme = [
            {key: ufunc.reduce([got[rank][key] for _, got in ours]) for key in arrays}
            for rank, arrays in enumerate(expected)
        ]
        for row, got in ours:
            differences = row.outcomes[case.name].differences
            for name, value in _largest(got, extreme, expected).items():
                differences[name] = max(differences.get(name, 0.0), value)


def time_steps(row: Row, ranks: Sequence[Written]) -> None:
    """Set the time of a step from the ranks' notes."""
    prefix = f"{row.surface}/{row.communicator}/"
    notes = [w.notes[key] for w in ranks for key in w.notes if key.startswith(prefix)]
    row.us_per_step = float(np.median([s for note in notes for s in note["seconds"]])) * 1e6


def relative_error(got: NDArrayAny, expected: NDArrayAny, scale: NDArrayAny) -> float:
    """Largest error relative to the largest entry of `scale`; infinite if NaN, 0 if empty."""
    if got.shape != expected.shape:
        return math.inf
    if not expected.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(scale).max()
    return float(error) if np.isfinite(error) else math.inf


def _averaged(row: Row, ranks: Sequence[Written], case: Case) -> list[Arrays]:
    """The ranks' arrays by "step/quantity", gradients of parameters averaged over the ranks.

    So do optimizers. torch's gradients are each rank's sums; Chainer's are means already.
    """
    prefix = f"{row.surface}/{row.communicator}/{case.name}/"
    by_rank = [
        {key.removeprefix(prefix): w.arrays[key] for key in w.arrays if key.startswith(prefix)}
        for w in ranks
    ]
    for key in by_rank[0]:
        if key.endswith(("/dweight", "/dbias")):
            mean = np.asarray(np.mean([a[key] for a in by_rank], axis=0, dtype=np.float64))
            for arrays in by_rank:
                arrays[key] = mean
    return by_rank


def _largest(
    got: Sequence[Arrays], expected: Sequence[Arrays], scale: Sequence[Arrays]
) -> dict[str, float]:
    """By quantity, the largest error over ranks and steps."""
    largest: dict[str, float] = {}
    for have, want, scales in zip(got, expected, scale, strict=True):
        for key in want:
            quantity = key.rpartition("/")[2]
            error = relative_error(have[key], want[key], scales[key])
            largest[quantity] = max(largest.get(quantity, 0.0), error)
    return largest


def _unexpected(row: Row, ranks: Sequence[Written], case: Case) -> list[list[int]]:
    """The messages of the first rank whose messages are not the expected ones."""
    for written in ranks:
        notes = written.notes[f"{row.surface}/{row.communicator}/{case.name}"]
        sent: list[list[int]] = notes["messages"]
        if sent != [messages(len(ranks))] * case.steps + [[]]:
            return sent
    return []
