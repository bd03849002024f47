"""Python calls in one step of a layer, forward and backward."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import multibn
from benchmarks.timing import Measured
from multibn import Communicator
from multibn.torch_backend import SyncBatchNorm

SHAPE = (4, 8, 4, 4)


def count(step: Callable[[], object]) -> dict[str, int]:
    """Frames of Python in the third call of `step`, those of multibn and those of torch.

    The first calls open lines and fill caches.
    """
    files: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    for _ in range(3):
        files.clear()
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(before)
    package = str(Path(multibn.__file__).parent)
    ours = sum(file.startswith(package) for file in files)
    return {"multibn": ours, "torch": sum("/torch/" in file for file in files)}


def measure(communicator: Communicator) -> Measured:
    """Notes: the calls of a synchronized layer and of nn.BatchNorm2d."""
    x, dy = torch.randn(*SHAPE, requires_grad=True), torch.randn(*SHAPE)
    layers = {
        "synchronized": SyncBatchNorm(SHAPE[1], process_group=communicator),
        "local": nn.BatchNorm2d(SHAPE[1]),
    }
    return {}, {name: count(lambda f=f: f(x).backward(dy)) for name, f in layers.items()}  # type: ignore[misc]
