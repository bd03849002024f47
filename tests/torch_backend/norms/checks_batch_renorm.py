"""Batch renormalization over ranks, beside an oracle in float64."""

from typing import Any

import numpy as np
import torch

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchRenorm1d
from tests.harness.runs import on
from tests.torch_backend.steps import checkpointed

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")

N, C, STEPS = 11, 3, 6
PARTS = {1: [11], 2: [3, 8], 4: [4, 0, 5, 2]}  # of the samples
RMAX, DMAX, SCHEDULE, EPS, MOMENTUM = 1.3, 0.4, (2, 4, 5), 0.1, 0.3
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2.5e-3, torch.float16: 1e-3}
WEIGHT, BIAS = np.array([1.5, -0.5, 1.0]), np.array([0.5, 0.1, -1.0])


def _rise(n: int, end: int) -> float:
    start = SCHEDULE[0]
    return min(max((n - start + 1) / (end - start + 1), 0.0), 1.0)


def _oracle(xs: list[Any], dys: list[Any]) -> list[list[Any]]:
    """Return y, dx, dweight, dbias and the running statistics of each step on the whole batch."""
    mean, var = np.zeros(C), np.ones(C)
    steps = []
    for n, (x, dy) in enumerate(zip(xs, dys, strict=True)):
        rmax, dmax = 1 + (RMAX - 1) * _rise(n, SCHEDULE[1]), DMAX * _rise(n, SCHEDULE[2])
        m, v = x.mean(0), x.var(0)
        std, running_std = np.sqrt(v + EPS), np.sqrt(var + EPS)
        r = np.clip(std / running_std, 1 / rmax, rmax)
        d = np.clip((m - mean) / running_std, -dmax, dmax)
        xhat, g = (x - m) / std, dy * WEIGHT * r
        dx = (g - g.mean(0) - xhat * (g * xhat).mean(0)) / std
        renormed = xhat * r + d
        mean, var = mean + MOMENTUM * (m - mean), var + MOMENTUM * (v * N / (N - 1) - var)
        y = renormed * WEIGHT + BIAS
        steps.append([y, dx, (dy * renormed).sum(0), dy.sum(0), mean, var])
    return steps


def check_ranks_renormalize_as_one_process(world: Communicator) -> None:
    """Also where the pass runs again in a checkpoint, in each dtype; of two, rank 0 compiles."""
    generator = torch.Generator().manual_seed(0)
    shape = STEPS, N, C
    given = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    given[0] = given[0] * torch.tensor([0.5, 2.0, 1.0]) + torch.tensor([0.3, -1.0, 0.0])
    wrong = []
    for way in ("eager", "checkpointed", *["compiled"] * (world.size == 2)):
        for dtype, bound in BOUNDS.items() if way == "eager" else [(torch.float64, 1e-11)]:
            torch._dynamo.reset()
            x, dy = given.to(dtype)
            wide = torch.promote_types(dtype, torch.float32)
            layer: Any = SyncBatchRenorm1d(
                C, EPS, MOMENTUM, rmax=RMAX, dmax=DMAX, schedule=SCHEDULE,
                process_group=world, dtype=wide,
            )  # fmt: skip
            with torch.no_grad():
                layer.weight.copy_(torch.tensor(WEIGHT))
                layer.bias.copy_(torch.tensor(BIAS))
            run = layer
            if way == "compiled" and world.rank == 0:
                run = torch.compile(layer, backend="aot_eager", fullgraph=True)
            steps = _oracle(*([v.double().numpy() for v in each] for each in (x, dy)))
            for step, right in enumerate(steps):
                mine, own_dy = (v[step].split(PARTS[world.size])[world.rank] for v in (x, dy))
                mine = mine.clone().requires_grad_()
                layer.zero_grad()
                y = run(mine) if way != "checkpointed" else checkpointed(layer, mine)
                y.backward(own_dy)
                found = []
                for v in (y, mine.grad):
                    assert v is not None
                    parts = [torch.zeros(n, C, dtype=torch.float64) for n in PARTS[world.size]]
                    parts[world.rank] += v.detach().double()
                    found.append(world.allreduce(torch.cat(parts)))
                found += [world.allreduce(p.grad.double()) for p in layer.parameters()]
                found += [layer.running_mean.double(), layer.running_var.double()]
                for k, (got, want) in enumerate(zip(found, right, strict=True)):
                    error = float((got - torch.tensor(want)).norm() / np.linalg.norm(want))
                    if not error < bound or y.dtype != dtype:
                        wrong.append((way, dtype, step, k, error))
    assert not wrong, wrong
