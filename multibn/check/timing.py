"""Steps that take turns, so that other load on the machine slows all of them alike."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from multibn.communicators import Communicator

Step: TypeAlias = Callable[[], object]
# A row for each round: the time on the wall, and of the processor.
Seconds: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
WALL, PROCESSOR = 0, 1

_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 101


def _now() -> Seconds:
    return np.array([time.perf_counter(), time.process_time()])


def training_step(layer: Any, x: Any, dy: Any) -> Step:
    """Forward and backward of a module of torch."""

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return step


def take_turns(
    steps: Mapping[str, Step],
    communicator: Communicator,
    *,
    seconds: float,
    wait: Step = lambda: None,
    finish: Step = lambda: None,
) -> dict[str, Seconds]:
    """Times of each step and of `finish`, in every round, on this rank; about `seconds` in all.

    Collective. All ranks start each step together, when each has returned from `wait`; each round
    begins with the next of the steps.
    """

    def together() -> None:
        wait()
        communicator.allreduce(np.zeros(1))

    for _ in range(2):  # the first round compiles and fills caches
        together()
        start = time.perf_counter()
        for step in steps.values():
            step()
        round_seconds = time.perf_counter() - start
    mean = float(communicator.allreduce(np.array([round_seconds]))[0]) / communicator.size
    rounds = int(np.clip(seconds / mean, _FEWEST_ROUNDS, _MOST_ROUNDS))
    names = list(steps)
    taken: dict[str, list[Seconds]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                together()
                before = _now()
                steps[name]()
                finish()
                taken[name].append(_now() - before)
    finally:
        gc.enable()
    return {name: np.array(times) for name, times in taken.items()}


def slowest(ranks: Sequence[Mapping[str, Seconds]]) -> dict[str, Seconds]:
    """Times of every step in every round, of the rank that took longest."""
    return {name: np.max([rank[name] for rank in ranks], axis=0) for name in ranks[0]}


def median_ms(times: Seconds) -> float:
    return float(np.median(times[:, WALL])) * 1e3
