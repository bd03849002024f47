"""Group and instance norms of samples whose last axis is split over ranks."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from multibn import torch_backend as tb
from multibn.communicators import Communicator
from tests.harness.runs import on, only
from tests.helpers.ranks import refusal
from tests.torch_backend.steps import step

RUNS = on("torchrun mpiexec", 2, 4, needs="torch")

N, C, L = 2, 6, 11
PARTS = [3, 8]  # of the last axis
LAYERS: list[tuple[Any, tuple[int, ...]]] = [  # with axes before the last
    (lambda **o: tb.SyncGroupNorm(3, C, **o), (5, 4)),
    (lambda **o: tb.SyncGroupNorm(2, C, affine=False, **o), (5,)),
    (lambda **o: tb.SyncGroupNorm(1, C, eps=0.1, bias=False, **o), (2, 3)),
    (lambda **o: tb.SyncInstanceNorm1d(C, **o), ()),
    (lambda **o: tb.SyncInstanceNorm2d(C, affine=True, **o), (5,)),
    (lambda **o: tb.SyncInstanceNorm3d(C, track_running_stats=True, **o), (2, 3)),
]


@only("torchrun", sizes=(2,))
def check_one_compiled_rank_is_beside_eager_ones(world: Communicator) -> None:
    for make, axes in LAYERS:
        torch._dynamo.reset()
        eager, mixed = (make(process_group=world, dtype=torch.float64) for _ in "ab")
        run = mixed
        if world.rank == 0:
            run = torch.compile(mixed, backend="aot_eager", fullgraph=True)
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(2, N, C, *axes, L, generator=generator, dtype=torch.float64)
        x, dy = whole.split(PARTS, dim=-1)[world.rank]
        for _ in "ab":
            expected, found = step(eager, x, dy), step(run, x, dy, mixed.parameters())
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixed.state_dict(), eager.state_dict(), rtol=1e-12, atol=1e-12)


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
