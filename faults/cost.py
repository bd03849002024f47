"""What the checks cost: `python -m faults.cost OVER SECONDS DIRECTORY` on each rank.

A step of a network like ResNet-50 with multibn's messages takes turns with the same step with bare
ones. So do the messages of a step alone: the surer comparison where the machine is not quiet.
"""

import os
import sys
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.resnet import network
from benchmarks.timing import Seconds, Step, take_turns
from multibn import Communicator, message
from multibn._launch import enter_world, leave_world, write
from multibn.communicators.conversation import Conversation
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm

_IMAGES = (8, 3, 112, 112)


class _Bare:
    """The transport's sum, in place, and nothing else."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._comm: Any = getattr(communicator, "comm", None)
        if self._comm is not None:
            from mpi4py import MPI  # initializes MPI

            self._in_place = MPI.IN_PLACE

    def allreduce(self, x: torch.Tensor, /) -> torch.Tensor:
        if self._comm is None:
            torch.distributed.all_reduce(x)
        else:
            self._comm.Allreduce(self._in_place, x.numpy())
        return x


def main(over: str, seconds: str, directory: str) -> None:
    if over == "gloo":
        os.environ["MULTIBN_SHARED_MEMORY"] = "0"  # bare messages have none
    communicator = enter_world(over)
    bare: Any = _Bare(communicator)
    networks = {"checked": network(), "bare": network()}
    for net in networks.values():
        convert_sync_batchnorm(net, communicator)
    layers = [m for m in networks["checked"].modules() if isinstance(m, SyncBatchNorm)]
    for layer in networks["bare"].modules():
        if isinstance(layer, SyncBatchNorm):
            layer.conversation = bare
    x = torch.randn(_IMAGES)
    labels = torch.arange(len(x))

    def step(net: torch.nn.Module) -> Step:
        def run() -> None:
            net.zero_grad()
            F.cross_entropy(net(x), labels).backward()

        return run

    steps = {name: step(net) for name, net in networks.items()}
    times = take_turns(steps, communicator, seconds=float(seconds))
    messages = take_turns(_messages(layers, communicator, bare), communicator, seconds=5.0)
    notes = _notes(times, messages) | {"layers": len(layers)}
    write(directory, communicator.rank, times, notes)
    leave_world()


def _messages(
    layers: list[SyncBatchNorm], communicator: Communicator, bare: Any
) -> dict[str, Step]:
    """The messages of a step, packed and summed as the layers do it, and by bare sums."""
    sends = []
    for i, layer in enumerate(layers):
        conversation = Conversation(communicator, f"layer {i}".__str__)
        lengths = {
            "forward": message.forward_payload(layer.num_features),
            "backward": message.backward_payload(layer.num_features),
        }
        for phase, length in lengths.items():
            sends.append((conversation.during(phase, torch.float32), np.ones(length)))
    memory = {numbers.size: torch.empty(numbers.size, dtype=torch.float64) for _, numbers in sends}

    def checked_messages() -> None:
        for phase, numbers in sends:
            payload = phase.buffer(numbers.size)
            assert payload is not None
            payload[:] = numbers
            phase.allreduce(payload)

    def bare_messages() -> None:
        for _, numbers in sends:
            payload = memory[numbers.size]
            payload.numpy()[:] = numbers
            bare.allreduce(payload)

    return {"checked": checked_messages, "bare": bare_messages}


def _notes(times: dict[str, Seconds], messages: dict[str, Seconds]) -> dict[str, float]:
    ratios = times["checked"] / times["bare"]
    # The median of samples drawn with replacement.
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    extra = float(np.median(messages["checked"] - messages["bare"]))
    step = float(np.median(times["bare"]))
    return {
        "rounds": len(ratios),
        "checked_ms": 1e3 * float(np.median(times["checked"])),
        "bare_ms": 1e3 * step,
        "ratio": float(np.median(ratios)),
        "low": float(np.quantile(medians, 0.025)),
        "high": float(np.quantile(medians, 0.975)),
        "messages_extra_ms": 1e3 * extra,
        "messages_extra": extra / step,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
