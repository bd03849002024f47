"""What the checks cost: `python -m faults.cost OVER SECONDS DIRECTORY` on each rank.

A step of a network like ResNet-50 with multibn's messages takes turns with the same step with bare
ones, and so do the step's messages alone, which says more where the machine is not quiet.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.resnet import network
from benchmarks.timing import Seconds, Step, take_turns
from multibn import Communicator
from multibn._launch import enter_world, leave_world, write
from multibn.communicators.conversation import Conversation
from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm

_IMAGES = (8, 3, 112, 112)


class _Bare:
    """The transport's sum, and nothing else."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator: Any = communicator

    def allreduce(self, x: torch.Tensor, /) -> torch.Tensor:
        if hasattr(self._communicator, "comm"):
            summed = np.empty_like(x.numpy())
            self._communicator.comm.Allreduce(x.numpy(), summed)
            return torch.from_numpy(summed)
        out = x.clone()
        torch.distributed.all_reduce(out)
        return out


def main(over: str, seconds: str, directory: str) -> None:
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
    """All messages of a step, by way."""
    channels = {m.num_features for m in layers}
    forward = {n: torch.ones(2 * n + 2, dtype=torch.float64) for n in channels}
    backward = {n: torch.ones(2 * n, dtype=torch.float64) for n in channels}
    own = [Conversation(communicator, f"layer {i}".__str__) for i, _ in enumerate(layers)]
    dtype = torch.float32  # of the activations

    def checked_messages() -> None:
        for layer, checked in zip(layers, own, strict=True):
            checked.during("forward", dtype).allreduce(forward[layer.num_features])
            checked.during("backward", dtype).allreduce(backward[layer.num_features])

    def bare_messages() -> None:
        for layer in layers:
            bare.allreduce(forward[layer.num_features])
            bare.allreduce(backward[layer.num_features])

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
