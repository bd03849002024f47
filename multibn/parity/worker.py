"""One rank of the parity command: `python -m multibn.parity.worker JOB DIRECTORY`.

JOB is JSON with `communicators` of one launcher, and either `surfaces` and `cases`, or `model`. A
surface is a framework's layer behind one small interface of NumPy arrays. The rank trains every
surface over every communicator, and writes arrays to DIRECTORY. It compares nothing, so that it
cannot fail and leave the other ranks waiting in a collective. Only constructors import frameworks.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from multibn._launch import enter_world, leave_world, write
from multibn.communicators import Communicator
from multibn.parity.cases import CASES, CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array

# One rank's arrays of a training step, with gradients as the framework returns them.
QUANTITIES = ("y", "dx", "dweight", "dbias", "running_mean", "running_var")


class TorchSurface:
    """multibn.torch_backend.SyncBatchNorm."""

    def __init__(self, case: Case, communicator: Communicator) -> None:
        import torch
        from torch.utils.checkpoint import checkpoint

        from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts

        weight, bias = map(torch.from_numpy, case.parameters())
        self.layer = SyncBatchNorm(
            CHANNELS,
            EPS,
            None if case.cumulative else MOMENTUM,
            process_group=communicator,
            weighting=case.weighting,
            running_var=case.running_var,
            dtype=weight.dtype,
        )
        self.layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
        self.call: Callable[..., Any] = self.layer
        if case.recompute:
            options: Any = {"use_reentrant": False, "context_fn": checkpoint_contexts}
            self.call = partial(checkpoint, self.layer, **options)

    def train(self, x: Array, dy: Array, **masks: Array) -> dict[str, Array]:
        """Forward, backward and the update of the running statistics."""
        import torch

        layer = self.layer
        t = torch.from_numpy(x).requires_grad_()
        layer.train().zero_grad()
        y = self.call(t, **{name: torch.from_numpy(a) for name, a in masks.items()})
        y.backward(torch.from_numpy(dy))
        gradients = t.grad, layer.weight.grad, layer.bias.grad
        results = y.detach(), *gradients, layer.running_mean, layer.running_var
        arrays = (a.numpy().copy() for a in results if a is not None)
        return dict(zip(QUANTITIES, arrays, strict=True))

    def evaluate(self, x: Array, **masks: Array) -> Array:
        """`x` normalized by the running statistics."""
        import torch

        with torch.no_grad():
            tensors = {name: torch.from_numpy(a) for name, a in masks.items()}
            return np.asarray(self.layer.eval()(torch.from_numpy(x), **tensors))


class ChainerSurface:
    """multibn.chainer_backend.MultiNodeBatchNormalization."""

    def __init__(self, case: Case, communicator: Communicator) -> None:
        from multibn.chainer_backend import MultiNodeBatchNormalization

        weight, bias = case.parameters()
        self.case = case
        self.link: Any = MultiNodeBatchNormalization(
            CHANNELS,
            communicator,
            1 - MOMENTUM,
            EPS,
            weight.dtype,
            weighting=case.weighting,
            avg_var=case.running_var,
        )
        self.link.gamma.array[...], self.link.beta.array[...] = weight, bias
        self.link.avg_var[...] = 1

    def train(self, x: Array, dy: Array, **masks: Array) -> dict[str, Array]:
        import chainer

        link = self.link
        v = chainer.Variable(x)
        link.cleargrads()
        options: Any = {"finetune": True} if self.case.cumulative else {}
        call = partial(link, **options, **masks)
        y = chainer.functions.forget(call, v) if self.case.recompute else call(v)
        y.grad = dy
        y.backward()
        results = y.array, v.grad, link.gamma.grad, link.beta.grad, link.avg_mean, link.avg_var
        return dict(zip(QUANTITIES, map(np.array, results), strict=True))

    def evaluate(self, x: Array, **masks: Array) -> Array:
        import chainer

        with chainer.using_config("train", False):
            return np.asarray(self.link(x, **masks).array)


SURFACES: dict[str, Any] = {"torch": TorchSurface, "chainer": ChainerSurface}


def train(surface: str, case: Case, communicator: Communicator) -> dict[str, Array]:
    """This rank's arrays by "step/quantity".

    Collective over `communicator`. The gradients of weight and bias are means over the ranks.
    """
    layer = SURFACES[surface](case, communicator)
    arrays: dict[str, Array] = {}
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        arguments = {} if case.padding is None else {"mask": masks[rank]}
        trained = layer.train(xs[rank], dys[rank], **arguments)
        # Optimizers average so. torch's gradients are each rank's sums; Chainer's are means.
        for name in ("dweight", "dbias"):
            total = communicator.allreduce(trained[name].astype(np.float64))
            trained[name] = np.asarray(total) / size
        arrays |= {f"{step}/{name}": a for name, a in trained.items()}
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    return arrays


def main(job: str, directory: str) -> None:
    """Run the job and write this rank's results to `directory`."""
    asked = json.loads(job)
    arrays: dict[str, Array] = {}
    notes: dict[str, Any] = {}
    for name in asked["communicators"]:
        communicator = enter_world(name)
        if "model" in asked:
            from multibn.parity import model

            arrays, notes = model.train(asked["model"], communicator)
        for surface in asked.get("surfaces", ()):
            for case in (case for case in CASES if case.name in asked["cases"]):
                trained = train(surface, case, communicator)
                arrays |= {f"{surface}/{name}/{case.name}/{k}": a for k, a in trained.items()}
    write(directory, communicator.rank, arrays, notes)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
