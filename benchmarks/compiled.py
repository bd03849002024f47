"""A residual block under torch.compile, synchronized and local, beside the same without."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.layer import memory_format
from benchmarks.worker import Measured
from multibn import Communicator
from multibn.check.network import Bottleneck
from multibn.check.timing import Seconds, Step, take_turns, training_step
from multibn.torch_backend import convert_sync_batchnorm

# Memory formats, and options of inductor. By default, inductor copies what enters and leaves the
# block to channels_last and back, on CPU.
LAYOUTS: dict[str, tuple[str, dict[str, bool]]] = {
    "NCHW": ("NCHW", {}),
    "NCHW, layout_optimization=False": ("NCHW", {"layout_optimization": False}),
    "channels_last": ("channels_last", {}),
}


def measure(communicator: Communicator, shape: Sequence[int], seconds: float) -> Measured:
    """Times of forward and backward by "layout/name"; the block keeps the number of channels."""
    times: dict[str, Seconds] = {}
    for name, (layout, options) in LAYOUTS.items():
        form = memory_format(layout, len(shape))
        x = torch.randn(*shape).to(memory_format=form).requires_grad_()
        dy = torch.randn(*shape).to(memory_format=form)

        def step(
            compiled: bool, synchronized: bool, x: Any = x, dy: Any = dy, options: Any = options
        ) -> Step:
            torch.manual_seed(0)
            block: Any = Bottleneck(shape[1], shape[1] // 4, 1)
            if synchronized:
                block = convert_sync_batchnorm(block, communicator)
            if compiled:
                block = torch.compile(block, fullgraph=True, options=options)
            return training_step(block, x, dy)

        steps = {
            f"{'compiled' if compiled else 'eager'} {kind}": step(compiled, kind == "synchronized")
            for compiled in (True, False)
            for kind in ("synchronized", "local")
        }
        taken = take_turns(steps, communicator, seconds=seconds)
        times |= {f"{name}/{model}": t for model, t in taken.items()}
    return times, {"shape": list(shape)}
