"""Group and instance norms of samples whose last axis is split over ranks, beside an oracle."""

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from multibn import torch_backend as tb
from multibn.communicators import Communicator
from tests.harness.runs import on, only
from tests.helpers.ranks import CountingCommunicator, refusal

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")

N, C, L = 2, 6, 11
PARTS = {1: [11], 2: [3, 8], 4: [4, 0, 5, 2]}  # of the last axis
# Of the error's norm, beside that of the oracle's numbers.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3, torch.float64: 1e-11}
LAYERS: dict[str, tuple[Any, tuple[int, ...], int]] = {  # with axes before the last, and groups
    "group": (lambda **o: tb.SyncGroupNorm(3, C, **o), (5, 4), 3),
    "no parameters": (lambda **o: tb.SyncGroupNorm(2, C, affine=False, **o), (5,), 2),
    "no bias": (lambda **o: tb.SyncGroupNorm(1, C, eps=0.1, bias=False, **o), (2, 3), 1),
    "one axis": (lambda **o: tb.SyncInstanceNorm1d(C, **o), (), C),
    "two axes": (lambda **o: tb.SyncInstanceNorm2d(C, affine=True, **o), (5,), C),
    "three axes": (lambda **o: tb.SyncInstanceNorm3d(C, track_running_stats=True, **o), (2, 3), C),
}


def oracle(numbers: list[Any], num_groups: int, eps: float) -> list[Any]:
    """Return the output, the gradients of input, weight and bias, mean and variance of groups."""
    x, dy, weight, bias = numbers
    of_channels = (-1, *[1] * (x.ndim - 2))
    grouped = x.reshape(len(x), num_groups, -1)
    mean, var = grouped.mean(2), grouped.var(2)
    invstd = 1 / np.sqrt(var + eps)[..., None]
    xhat = (grouped - mean[..., None]) * invstd
    g = (dy * weight.reshape(of_channels)).reshape(grouped.shape)
    means = g.mean(2, keepdims=True) + xhat * (g * xhat).mean(2, keepdims=True)
    dx = (invstd * (g - means)).reshape(x.shape)
    xhat = xhat.reshape(x.shape)
    y = xhat * weight.reshape(of_channels) + bias.reshape(of_channels)
    axes = (0, *range(2, x.ndim))
    return [y, dx, (dy * xhat).sum(axes), dy.sum(axes), mean, var]


def whole(dtype: torch.dtype, *axes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, *axes, L, generator=generator, dtype=torch.float64)
    return ((2 * x + 3) if seed == 0 else x).to(dtype)


def part(x: Tensor, world: Communicator) -> Tensor:
    return x.split(PARTS[world.size], dim=-1)[world.rank]


def error(found: Tensor, right: Any) -> float:
    return float((found.double() - torch.tensor(right)).norm() / np.linalg.norm(right))


def train(layer: Any, x: Tensor, dy: Tensor, run: Any = None) -> list[Tensor]:
    is_last = x.ndim == 5  # the channels, in memory
    x = x.contiguous(memory_format=torch.channels_last_3d if is_last else torch.contiguous_format)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = (layer if run is None else run)(x)
    y.backward(dy)
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == x.dtype
    assert y.stride() == x.grad.stride() == x.stride() or not x.numel()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def check_parts_of_samples_are_normalized_as_one_process_would(world: Communicator) -> None:
    counting, wrong = CountingCommunicator(world), []
    for (name, (make, axes, groups)), dtype in product(LAYERS.items(), BOUNDS):
        wide = torch.promote_types(dtype, torch.float32)  # as in mixed precision
        layer: Any = make(process_group=counting, dtype=wide)
        x, dy = whole(dtype, *axes), whole(dtype, *axes, seed=1)
        torch.manual_seed(0)
        for p in layer.parameters():
            nn.init.normal_(p)
        weight = torch.ones(C) if layer.weight is None else layer.weight
        bias = torch.zeros(C) if layer.bias is None else layer.bias
        numbers = [v.detach().double().numpy() for v in (x, dy, weight, bias)]
        right = oracle(numbers, groups, layer.eps)
        for _ in range(2):  # the first call compares the layers
            counting.take()
            y, dx, *gradients = train(layer, part(x, world), part(dy, world))
        messages = counting.take()
        sums = [world.allreduce(g.double()) for g in gradients]
        pairs = [*zip(sums, right[2:4], strict=False)]
        for found, of_all in ((y, right[0]), (dx, right[1])):
            parts = [torch.zeros(N, C, *axes, n, dtype=torch.float64) for n in PARTS[world.size]]
            parts[world.rank] += found.double()
            pairs.append((world.allreduce(torch.cat(parts, -1)), of_all))
        if name == "three axes":
            count = np.prod(axes) * L
            mean, var = right[4].mean(0), right[5].mean(0) * count / (count - 1)
            pairs.append((layer.running_mean, (1 - 0.9**2) * mean))
            pairs.append((layer.running_var, (1 - 0.9**2) * var + 0.9**2))
        errors = [error(*pair) for pair in pairs]
        size = 2 * N * groups + 4
        if max(errors) > BOUNDS[dtype] or messages != [size, size - 2] * (world.size > 1):
            wrong.append((name, dtype, errors, messages))
    assert not wrong, wrong


@only("torchrun", sizes=(2,))
def check_one_compiled_rank_is_beside_eager_ones(world: Communicator) -> None:
    for make, axes, _ in LAYERS.values():
        torch._dynamo.reset()
        eager, mixed = (make(process_group=world, dtype=torch.float64) for _ in "ab")
        run = mixed
        if world.rank == 0:
            run = torch.compile(mixed, backend="aot_eager", fullgraph=True)
        x, dy = (part(whole(torch.float64, *axes, seed=n), world) for n in (0, 1))
        for _ in "ab":
            expected, found = train(eager, x, dy), train(mixed, x, dy, run)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixed.state_dict(), eager.state_dict(), rtol=1e-12, atol=1e-12)


@only(sizes=(2, 4))
def check_another_number_of_samples_or_groups_is_named(world: Communicator) -> None:
    """Name it in the first call, in a later one, and where the messages are of one length."""
    x, rank = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0)), world.size - 1
    last, errors = world.rank == rank, []
    # Samples and groups of the other ranks, and of the last.
    cases = [((2, 4), (1, 4)), ((2, 2), (2, 4)), ((2, 4), (4, 2))]
    for samples, groups in [(case[last], case) for case in cases]:
        for calls_before in (0, 1):
            layer = tb.SyncGroupNorm(samples[1], 4, process_group=world)
            if calls_before and groups[0][1] == groups[1][1]:
                layer(x[:3])
            with pytest.raises((RuntimeError, ValueError)) as raised:
                layer(x[: samples[0]])
            errors.append((groups, str(raised.value)))
    layer = tb.SyncGroupNorm(4, 4, process_group=world)
    torch.testing.assert_close(layer(x), nn.GroupNorm(4, 4)(x))  # all is well
    with refusal(world, rank, ValueError, "must have 4 channels"):
        layer(x[:, :3] if last else x)
    for groups, error in errors:
        ours, others = (f"N={N}, num_groups={G}" for N, G in groups)
        assert re.search(rf"{ours}.*rank\(s\) \[{rank}\] .*{others}", error), error
