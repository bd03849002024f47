"""The GPU on which a part runs, or what stands for a GPU on a machine without one.

With stand-ins, tensors are in host memory, sizes are small, and times mean nothing: tests then see
that every part runs to its end.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from multibn import kernels, wire
from multibn._typing import HostArray
from multibn.communicators.channel import Channel, ChannelCommunicator
from multibn.engine import plan
from multibn.kernels import cuda

STAND_INS = os.environ.get("MULTIBN_GPU_STAND_INS") == "1"
DEVICE = torch.device("cpu" if STAND_INS else "cuda")

_T = TypeVar("_T")
_WARM_UP = 3  # the first step compiles, the second allocates what the first has freed


def sized(full: _T, small: _T) -> _T:
    """`full` on a GPU, `small` on stand-ins."""
    return small if STAND_INS else full


def synchronize() -> None:
    if not STAND_INS:
        torch.cuda.synchronize()


class _EqualChannel(Channel):
    """The channel of two equal ranks: their layers compare equal."""

    def __init__(self) -> None:
        transport: Any = SimpleNamespace(
            rank=0, size=2, block=np.zeros(wire.length(256)), board=None, carrier="equal ranks"
        )
        transport.prepare_block = lambda n: lambda: self._sum(transport.block)
        transport.prepare = lambda a: lambda: self._sum(a)
        transport.close = transport.end_process = lambda **_: None
        super().__init__(transport)

    def allreduce_checked(self, a: HostArray, *facts: str) -> HostArray:
        return 2 * a

    def _sum(self, a: HostArray) -> None:
        a *= 2


class Equal(ChannelCommunicator):
    """Two equal ranks, of which this process is one: sums are twice those of `over`.

    One GPU then takes the way of several ranks, with all checks of messages. The doubling is one
    small launch for each message, which real ranks do not have.
    """

    rank, size = 0, 2

    def __init__(self, over: Any) -> None:
        self._over = over
        self._channel = _EqualChannel()

    @property
    def channel(self) -> Any:
        return self._channel

    def reduces_on_device(self, x: Any, /) -> bool:
        return True

    def allreduce(self, x: Any, /, place: str = "") -> Any:
        summed = self._over.allreduce(x)
        summed *= 2
        return summed

    def allreduce_in_place(self, x: Any, /) -> Any:
        if isinstance(self._over, ChannelCommunicator):
            # Real ranks ask `takes` once, and not for each message.
            if not (x.is_cuda or self._over.reduces_on_device(x)):
                return self.allreduce(x)
            x = getattr(self._over, "allreduce_in_place", self._over.allreduce)(x)
        x *= 2
        return x

    def split(self, color: int, key: int = 0) -> "Equal":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Equal, (self._over,)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """What replays `step`, from a CUDA graph."""
    if STAND_INS:
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL ask the driver about events meanwhile, which "global" would call an error.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


@contextlib.contextmanager
def host_waits_are_errors() -> Iterator[None]:
    if STAND_INS:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_microseconds(step: Callable[[], object]) -> float:
    """GPU time of `step` without the host: median of replays of a CUDA graph."""
    replay = captured(step)
    once = _microseconds_of(replay, 1)
    n = max(round(30e3 / max(once, 1.0)), 3) if not STAND_INS else 1
    return median(_microseconds_of(replay, n) for _ in range(sized(7, 1)))


def _microseconds_of(replay: Callable[[], object], n: int) -> float:
    if STAND_INS:
        begin = time.perf_counter()
        replay()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / n * 1e3


def use_gpu_kernels(patch: pytest.MonkeyPatch) -> None:
    """Compute on tensors in host memory by `kernels.cuda`, interpreted, if there are stand-ins."""
    if not STAND_INS:
        return

    def selected(x: Any, /, *others: Any) -> Any:
        differentiated = any(getattr(a, "requires_grad", False) for a in (x, *others))
        return kernels.reference if differentiated and torch.is_grad_enabled() else cuda

    patch.setattr(kernels, "select", selected)
    # Messages as on a GPU, not in a line's memory.
    patch.setattr(plan, "_memory_kind", lambda x: "torch's GPU")
