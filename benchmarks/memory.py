"""Memory of one layer's step, and the cost of the first call.

Memory is the growth of the process, as Linux counts it: all pages that torch, NumPy and compiled
code have touched. Pages that were reserved and never touched do not count.
"""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.layer import layouts, memory_format
from benchmarks.timing import Seconds
from multibn import Communicator, SingleProcess

TimesAndNotes = tuple[dict[str, Seconds], dict[str, Any]]


def measure_torch(communicator: Communicator, shape: Sequence[int]) -> TimesAndNotes:
    """Notes under "layer/layout": `_step_memory`, and the bytes that autograd saves.

    An array of `shape` must have 33 MB or more: the allocator returns such memory to the system at
    once, and would keep smaller arrays, which then show in no count.
    """
    import torch
    from torch import nn

    from benchmarks.peers import NaiveFormula
    from multibn.torch_backend import SyncBatchNorm

    layers: dict[str, nn.Module] = {
        "multibn": SyncBatchNorm(shape[1], process_group=communicator),
        "nn.BatchNorm": nn.BatchNorm2d(shape[1]),
        "naive": NaiveFormula(shape[1], communicator),
    }
    notes = {}
    for layout in layouts(shape):
        form = memory_format(layout, len(shape))
        x = torch.randn(*shape).to(memory_format=form).requires_grad_()
        dy = torch.randn(*shape).to(memory_format=form)
        for name, layer in layers.items():
            saved: dict[int, int] = {}

            def pack(t: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                storage = t.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return t

            def forward(layer: nn.Module = layer, x: torch.Tensor = x) -> Any:
                return layer(x)

            def backward(y: Any, dy: torch.Tensor = dy) -> None:
                y.backward(dy)

            def forget(layer: nn.Module = layer, x: torch.Tensor = x) -> None:
                x.grad = None
                layer.zero_grad()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                layer(x).sum()
            saved.pop(x.untyped_storage().data_ptr(), None)
            notes[f"{name}/{layout}"] = {
                "saved_beside_input_bytes": sum(saved.values()),
                **_step_memory(forward, backward, forget, x.nbytes),
            }
    return {}, notes


def measure_chainer(communicator: Any, shape: Sequence[int]) -> TimesAndNotes:
    """As `measure_torch`, without the bytes that autograd saves; over ChainerMN's communicator."""
    from multibn.chainer_backend import MultiNodeBatchNormalization  # before chainer

    # isort: split
    import chainer

    from benchmarks.peers import chainermn_link

    links = {
        "multibn, Chainer": MultiNodeBatchNormalization(shape[1], communicator),
        "ChainerMN": chainermn_link(shape[1], communicator.comm),
    }
    rng = np.random.default_rng(communicator.rank)
    x = chainer.Variable(rng.standard_normal(shape, np.float32))
    dy = rng.standard_normal(shape, np.float32)
    notes = {}
    for name, link in links.items():

        def forward(link: Any = link) -> Any:
            y = link(x)
            y.grad = dy
            return y

        def forget(link: Any = link) -> None:
            x.cleargrad()
            link.cleargrads()

        notes[f"{name}/NCHW"] = _step_memory(
            forward, lambda y: y.backward(), forget, x.array.nbytes
        )
    return {}, notes


def _step_memory(
    forward: Callable[[], Any],
    backward: Callable[[Any], object],
    forget: Callable[[], object],
    num_bytes: int,
) -> dict[str, float]:
    """Growth in units of the input's size, beside input, output and their gradients.

    `saved` is the growth between the passes; `forward` and `backward` are the peaks of each pass.
    """
    backward(forward())  # compiles
    forget()
    before = _resident("VmRSS")
    _reset_peak()
    y = forward()
    peak, after = _resident("VmHWM"), _resident("VmRSS")
    growth = {"saved": after - before - num_bytes, "forward": peak - before - num_bytes}
    _reset_peak()
    backward(y)
    growth["backward"] = _resident("VmHWM") - after - num_bytes
    del y
    forget()
    return {name: value / num_bytes for name, value in growth.items()}


def _resident(field: str) -> int:
    """Bytes that are resident: now (VmRSS), or at the peak since `_reset_peak` (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    if not match:
        raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only.")
    return int(match[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure_first_call(communicator: Communicator, shape: Sequence[int]) -> TimesAndNotes:
    """Seconds of the first steps in this process."""
    import torch
    from torch import nn

    x = torch.randn(*shape, requires_grad=True)
    dy = torch.randn(*shape)

    def seconds(layer: nn.Module, x: torch.Tensor = x) -> float:
        start = time.perf_counter()
        layer(x).backward(dy)
        return time.perf_counter() - start

    local = nn.BatchNorm2d(shape[1])
    notes = {"nn.BatchNorm, first": seconds(local)}
    notes["nn.BatchNorm, later"] = statistics.median(seconds(local) for _ in range(5))
    start = time.perf_counter()
    from multibn.torch_backend import SyncBatchNorm

    notes["import multibn.torch_backend"] = time.perf_counter() - start
    layer = SyncBatchNorm(shape[1], process_group=SingleProcess())
    notes["multibn, first"] = seconds(layer)
    x_last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    notes["multibn, first in channels_last"] = seconds(layer, x_last)
    notes["multibn, later"] = statistics.median(seconds(layer) for _ in range(5))
    return {}, notes
