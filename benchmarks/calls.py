"""Python calls in one step of a layer, forward and backward."""

import sys
from pathlib import Path
from typing import Any

import torch

import multibn
from benchmarks.timing import Measured, training_step
from multibn import Communicator
from multibn.torch_backend import SyncBatchNorm

SHAPE = (4, 8, 4, 4)


def measure(communicator: Communicator) -> Measured:
    """Notes: frames of multibn in the third step; the first open lines and fill caches."""
    x, dy = torch.randn(*SHAPE, requires_grad=True), torch.randn(*SHAPE)
    step = training_step(SyncBatchNorm(SHAPE[1], process_group=communicator), x, dy)
    package = str(Path(multibn.__file__).parent)
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    for _ in range(3):
        calls = 0
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    return {}, {"calls": calls}
