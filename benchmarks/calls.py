"""The Python calls of a warm step, from a trace on two ranks: `python -m benchmarks.calls`.

Prints the call tree of a layer's forward and backward pass, with the file of each function, and how
many frames, files, changes of file and calls each pass has. benchmarks/step.md has the trees.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np

from multibn import Communicator
from multibn.parity.launch import run_workers

WARM, TRACED = 60, 5  # steps
FRAMEWORKS = {"torch": "gloo", "chainer": "mpi"}
_ROOT = os.sep + "multibn" + os.sep


def _traced(call: Callable[[], object]) -> dict[str, Any]:
    """The frames of multibn in a call, as (depth, file, function); and the number of all calls."""
    frames: list[tuple[int, str, str]] = []
    calls, depth = 0, 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, depth
        code = frame.f_code
        is_ours = _ROOT in code.co_filename and "benchmarks" not in code.co_filename
        if event == "call":
            calls += 1
            if is_ours:
                name = code.co_filename.rpartition(_ROOT)[2].replace(os.sep, "/")
                frames.append((depth, name, code.co_qualname))
                depth += 1
        elif event == "return" and is_ours:
            depth -= 1
        elif event == "c_call":
            calls += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {"frames": frames, "calls": calls}


def torch(communicator: Communicator) -> list[dict[str, Any]]:
    """The traces of a forward and a backward pass. Collective."""
    import torch

    from multibn.torch import SyncBatchNorm

    layer = SyncBatchNorm(16, process_group=communicator)
    x, dy = torch.randn(4, 16, 8, 8, requires_grad=True), torch.ones(4, 16, 8, 8)
    ys: list[torch.Tensor] = []
    for _ in range(WARM):
        layer(x).backward(dy)
    return _shortest(lambda: ys.append(layer(x)), lambda: ys.pop().backward(dy))


def chainer(communicator: Communicator) -> list[dict[str, Any]]:
    """The traces of a forward and a backward pass. Collective."""
    from multibn.chainer import MultiNodeBatchNormalization

    link = MultiNodeBatchNormalization(16, communicator)
    x = np.random.default_rng(0).standard_normal((4, 16, 8, 8), np.float32)
    ys: list[Any] = []

    def backward(y: Any) -> None:
        y.grad = np.ones_like(x)
        y.backward()

    import chainer

    for _ in range(WARM):
        backward(link(chainer.Variable(x)))
    v = chainer.Variable(x)
    return _shortest(lambda: ys.append(link(v)), lambda: backward(ys.pop()))


def _length(trace: dict[str, Any]) -> tuple[int, int]:
    """How long a trace is: a rank that waits has frames more, though other calls may be fewer."""
    return len(trace["frames"]), trace["calls"]


def _shortest(*passes: Callable[[], object]) -> list[dict[str, Any]]:
    """The shortest trace of each pass in several steps: a rank that waits asks more often."""
    steps = [[_traced(each) for each in passes] for _ in range(TRACED)]
    return [min(each, key=_length) for each in zip(*steps, strict=True)]


def traces(framework: str) -> list[dict[str, Any]]:
    """The shortest trace of a forward and of a backward pass on two ranks."""
    of_ranks = run_workers(f"benchmarks.calls.{framework}", FRAMEWORKS[framework], 2, timeout=120)
    return [min(each, key=_length) for each in zip(*of_ranks, strict=True)]


def tree(trace: dict[str, Any]) -> Iterator[str]:
    """The call tree, a line for each frame but those of comprehensions."""
    frames = [frame for frame in trace["frames"] if not frame[2].endswith(">")]
    calls = ["  " * depth + name.replace("<locals>.", "") for depth, _, name in frames]
    for call, (_, file, _) in zip(calls, frames, strict=True):
        yield f"{call:{max(map(len, calls))}}  {file}"


def count(trace: dict[str, Any]) -> str:
    """How many frames, files, changes of file and calls a trace has."""
    files = [file for _, file, _ in trace["frames"]]
    changes = sum(a != b for a, b in itertools.pairwise(files))
    return (
        f"{len(files)} frames in {len({*files})} files, {changes} changes of file, "
        f"{trace['calls']} calls in all"
    )


def main() -> None:
    """Print the trees."""
    for framework in FRAMEWORKS:
        for name, trace in zip(("forward", "backward"), traces(framework), strict=True):
            print(f"{framework}, {name}: {count(trace)}", *tree(trace), "", sep="\n")


if __name__ == "__main__":
    main()
