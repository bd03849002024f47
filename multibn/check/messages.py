"""A layer's forward message with all its checks, and the bare allreduce of as many numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from multibn import message
from multibn.check.timing import Step
from multibn.communicators.conversation import Conversation


def message_steps(
    communicator: Any, C: int, *, repeat: int, on_gpu: bool = False
) -> Mapping[str, Step]:
    """Steps of `repeat` messages each, "checked" and "bare", of a layer of C channels."""
    phase = Conversation(communicator, lambda: f"{C}").during("forward", np.dtype(np.float32))
    n = message.forward_payload(C)
    numbers: Any = np.zeros(message.length(C))
    zeros, total, over_mpi = numbers, numbers.copy(), hasattr(communicator, "mpi_comm")
    if not over_mpi or on_gpu:
        import torch

        numbers = torch.zeros(len(numbers), dtype=torch.float64)

    def checked() -> None:
        memory: Any = phase.message(n, numbers) if on_gpu else phase.buffer(n)
        if isinstance(memory, message.Message):
            memory.write(numbers[:n])
        elif memory is None:
            memory = numbers[:n]
        else:
            memory[:] = 1
        phase.allreduce(memory)

    def bare() -> None:
        if over_mpi:
            communicator.mpi_comm.Allreduce(zeros, total)
        else:
            torch.distributed.all_reduce(numbers)

    def repeated(step: Step) -> Step:
        return lambda: [step() for _ in range(repeat)]

    return {"checked": repeated(checked), "bare": repeated(bare)}
