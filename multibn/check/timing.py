"""Interleaved timing: other load on the machine slows all candidates equally."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from multibn import wire
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import LayerCommunicator

Step: TypeAlias = Callable[[], object]
# A row for each round: wall time and processor time.
Seconds: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
WALL, PROCESSOR = 0, 1
_ROUNDS = 5, 101  # minimum and maximum


def training_step(layer: Any, x: Any, dy: Any) -> Step:
    """Return a function that runs a torch module forward and backward."""

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return step


def message_steps(
    communicator: Any, C: int, *, repeat: int, on_gpu: bool = False
) -> dict[str, Step]:
    """Return two steps: `repeat` forward messages of C channels, and as many bare allreduces."""
    n, sent = wire.forward_payload(C), np.zeros(wire.length(C))
    numbers: Any = sent
    layer = LayerCommunicator(communicator, lambda: f"{C}")
    bare: Step = lambda: communicator.mpi_comm.Allreduce(sent, sent.copy())  # noqa: E731
    if on_gpu or not hasattr(communicator, "mpi_comm"):
        import torch
        import torch.distributed as dist

        numbers = torch.zeros(len(sent), dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        if dist.is_initialized():
            bare = lambda: dist.all_reduce(numbers)  # noqa: E731

    phase = layer.for_phase("forward", np.dtype(np.float32), n, like=numbers)
    reduces_on_device = on_gpu and phase.reduces_on_device(numbers)

    def checked() -> None:
        if reduces_on_device:
            phase.allreduce(phase.message(numbers).write(numbers[:n]))
        else:
            phase.allreduce(phase.buffer())

    calls = {"checked": checked, "bare": bare}
    return {name: lambda call=call: [call() for _ in range(repeat)] for name, call in calls.items()}  # type: ignore[misc]


def take_turns(
    steps: Mapping[str, Step],
    communicator: Communicator,
    *,
    seconds: float,
    wait: Step = lambda: None,
    finish: Step = lambda: None,
) -> dict[str, Seconds]:
    """Time every step once per round, for about `seconds`. Collective.

    All ranks start a step together, after `wait` has returned on all ranks; its time includes
    `finish`. Each round begins with a different step.
    """

    def time_of(step: Step) -> list[float]:
        wait()
        communicator.allreduce(np.zeros(1))
        before = time.perf_counter(), time.process_time()
        step()
        finish()
        return [time.perf_counter() - before[WALL], time.process_time() - before[PROCESSOR]]

    for _ in range(2):  # the first round compiles and fills caches
        round_time = sum(time_of(step)[WALL] for step in steps.values())
    mean = float(communicator.allreduce(np.array([round_time]))[0]) / communicator.size
    names = list(steps)
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for i in range(int(np.clip(seconds / mean, *_ROUNDS))):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(time_of(steps[name]))
    finally:
        gc.enable()
    return {name: np.array(rows) for name, rows in times.items()}


def slowest(ranks: Sequence[Mapping[str, Seconds]]) -> dict[str, Seconds]:
    """Return the times of the slowest rank for each step and round."""
    return {name: np.max([rank[name] for rank in ranks], axis=0) for name in ranks[0]}


def median_ms(times: Seconds) -> float:
    return float(np.median(times[:, WALL])) * 1e3
