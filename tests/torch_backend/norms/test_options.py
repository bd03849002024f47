"""Every option of a norm of samples does what it says, compared with torch's on whole samples."""

from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn import torch_backend as tb
from multibn.torch_backend.norms.group_norm import SyncGroupsBase
from tests.helpers.ranks import run_ranks

NEEDS = "torch"

# Norms of samples, of whose last axis each rank has a part, their peers on whole samples, and the
# axes before the last.
OF_SAMPLES: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "group": (partial(tb.SyncGroupNorm, 3), partial(nn.GroupNorm, 3), (5, 4)),
    "instance": (tb.SyncInstanceNorm1d, nn.InstanceNorm1d, ()),
    "instance of 2 axes": (tb.SyncInstanceNorm2d, nn.InstanceNorm2d, (5,)),
    "instance of 3 axes": (tb.SyncInstanceNorm3d, nn.InstanceNorm3d, (2, 3)),
}
# Each with an option that is not the default.
OTHERS_OF_SAMPLES: list[dict[str, Any]] = [
    {"affine": True, "eps": 0.3}, {"affine": False}, {"affine": True, "bias": False},
    {"affine": True, "nonfinite": "skip"}, {"affine": True, "nonfinite": "raise"},
    {"momentum": 0.7, "track_running_stats": True}, {"track_running_stats": True},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has skipped a batch")
@pytest.mark.parametrize(
    "name, options",
    [
        (name, options)
        for name in OF_SAMPLES
        for options in OTHERS_OF_SAMPLES
        if name != "group" or "track_running_stats" not in options
    ],
    ids=str,
)
def test_options_of_norms_of_samples_do_what_they_say(name: str, options: dict[str, Any]) -> None:
    kind, peer_kind, axes = OF_SAMPLES[name]
    nonfinite = {key: v for key, v in options.items() if key == "nonfinite"}
    peer: Any = peer_kind(6, dtype=torch.float64, **(options if not nonfinite else {}))
    for p in peer.parameters():
        nn.init.normal_(p)
    whole, dy = torch.randn(2, 3, 6, *axes, 11, dtype=torch.float64)
    last = torch.channels_last_3d if len(axes) == 2 else torch.contiguous_format
    if nonfinite:
        whole[0, 0, -1] = np.nan

    def train(comm: Any) -> list[Any]:
        layer = kind(6, process_group=comm, dtype=torch.float64, **options)
        layer.load_state_dict(peer.state_dict(), strict=False)
        part = [slice(3), slice(3, None)][comm.rank]
        x = whole[..., part].contiguous(memory_format=last).requires_grad_()
        y = layer(x)
        y.backward(dy[..., part])
        assert x.grad is not None
        assert y.stride() == x.grad.stride() == x.stride()
        return [y.detach(), x.grad, [p.grad for p in layer.parameters()], [*layer.buffers()]]

    if options.get("nonfinite") == "raise":
        with pytest.raises(FloatingPointError):
            run_ranks(2, train)
        return
    before = [b.clone() for b in peer.buffers()]
    left, right = run_ranks(2, train)
    if nonfinite:
        assert torch.cat([left[0], right[0]], -1).isnan().all()
        torch.testing.assert_close(left[3], before)
        return
    x = whole.requires_grad_()
    y = peer(x)
    y.backward(dy)
    sums = [a + b for a, b in zip(left[2], right[2], strict=True)]
    found = [*(torch.cat(parts, -1) for parts in zip(left[:2], right[:2], strict=True)), *sums]
    expected = [y.detach(), x.grad, *(p.grad for p in peer.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    for rank in (left, right):
        torch.testing.assert_close(rank[3], [*peer.buffers()])


def test_every_option_of_a_norm_of_samples_is_tried() -> None:
    taken = {*signature(SyncGroupsBase).parameters, *signature(nn.InstanceNorm1d).parameters}
    tried = {option for options in OTHERS_OF_SAMPLES for option in options} - {"bias"}  # torch's
    assert {field.name for field in fields(SyncGroupsBase.Options)} & taken == tried
