"""Memory of one layer's step, and what the first call costs.

Memory is the growth of the process, as Linux counts it: what torch, NumPy and compiled code touched
is seen alike; pages that were reserved and never touched are not.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import Seconds
from multibn import Communicator, SingleProcess

Found = tuple[dict[str, Seconds], dict[str, Any]]


def measure_torch(communicator: Communicator, shape: Sequence[int]) -> Found:
    """Notes by "layer/layout": what `_step_memory` returns, and what autograd was given to save.

    `shape` must be of 33 MB or more, which the allocator returns to the system at once.
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
    for layout, memory_format in {
        "NCHW": torch.contiguous_format,
        "channels_last": torch.channels_last,
    }.items():
        x = torch.randn(*shape).to(memory_format=memory_format).requires_grad_()
        dy = torch.randn(*shape).to(memory_format=memory_format)
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


def measure_chainer(communicator: Any, shape: Sequence[int]) -> Found:
    """As `measure_torch`, without what autograd was given; over a communicator of ChainerMN's."""
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

    `saved`, between the passes; `forward` and `backward`, at most during each.
    """
    backward(forward())  # compiles
    forget()
    before = _resident("VmRSS")
    _reset_peak()
    y = forward()
    peak, after = _resident("VmHWM"), _resident("VmRSS")
    found = {"saved": after - before - num_bytes, "forward": peak - before - num_bytes}
    _reset_peak()
    backward(y)
    found["backward"] = _resident("VmHWM") - after - num_bytes
    del y
    forget()
    return {name: value / num_bytes for name, value in found.items()}


def _resident(field: str) -> int:
    """Bytes: VmRSS, resident now; VmHWM, the most since `_reset_peak`."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    if not found:
        raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only.")
    return int(found[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure_first_call(communicator: Communicator, shape: Sequence[int], cache: str) -> Found:
    """Seconds of the first steps in this process; compiled kernels are looked up in `cache`."""
    os.environ["NUMBA_CACHE_DIR"] = cache
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
