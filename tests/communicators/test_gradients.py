"""Ranks of which one alone would send a backward message: an error in the forward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks

WITH = r"rank\(s\) \[0\] in {0}\(forward, float32, call 1\), with gradients; "
WITHOUT = r"rank\(s\) \[1\] in {0}\(forward, float32, call 1\), without gradients\. Those with "


def _torch(world: ThreadCommunicator, here: Callable[..., Any]) -> None:
    require.need("torch")
    import torch
    from torch import nn

    from multibn.torch_backend import SyncBatchNorm

    torch.manual_seed(0)
    first, bn = nn.Linear(3, 4), SyncBatchNorm(4, process_group=world)
    here(torch, first, bn, torch.randn(5, 3))


def _chainer(world: ThreadCommunicator, here: Callable[..., Any]) -> None:
    require.need("chainer")
    from multibn.chainer_backend import MultiNodeBatchNormalization, compat

    compat.make_importable()
    import chainer

    link = MultiNodeBatchNormalization(4, world)
    here(chainer, link, np.random.default_rng(0).normal(size=(5, 4)).astype("f"))


def _learn(y: Any) -> None:
    (y**2).sum().backward()


def _frozen(torch: Any, first: Any, bn: Any, x: Any) -> None:
    first.requires_grad_(False)
    _learn(bn(first(x)))


def _without(torch: Any, first: Any, bn: Any, x: Any) -> None:
    with torch.no_grad():
        bn(first(x))


def _trained(torch: Any, first: Any, bn: Any, x: Any) -> None:
    _learn(bn(first(x)))


def _scale_frozen(torch: Any, first: Any, bn: Any, x: Any) -> None:
    bn.weight.requires_grad_(False)
    _learn(bn(first(x)))


def _empty(torch: Any, first: Any, bn: Any, x: Any) -> None:
    _learn(bn(first(x[:0])))


def _checkpointed(torch: Any, first: Any, bn: Any, x: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    from multibn.torch_backend import recomputed

    both = recomputed(lambda x: bn(first(x)))
    _learn(checkpoint(both, x.requires_grad_(), use_reentrant=True))


def _reversible(torch: Any, first: Any, bn: Any, x: Any) -> None:
    from multibn.torch_backend.reversible import reversible

    y = first(x)
    _learn(sum(reversible([(bn, torch.nn.Identity())], y, y, mode="reversible")))


def _stored(torch: Any, first: Any, bn: Any, x: Any) -> None:
    from multibn.torch_backend.reversible import reversible

    y = first(x)
    _learn(sum(reversible([(bn, torch.nn.Identity())], y, y, mode="stored")))


def _twice(torch: Any, first: Any, bn: Any, x: Any) -> None:
    x.requires_grad_()
    (dx,) = torch.autograd.grad((bn(first(x)) ** 2).sum(), x, create_graph=True)
    _learn(dx)


def _evaluated(torch: Any, first: Any, bn: Any, x: Any) -> None:
    bn.eval()(first(x))


@pytest.mark.parametrize("other", [_frozen, _without])
def test_a_gradient_on_one_rank_only(other: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=(WITH + WITHOUT).format("SyncBatchNorm ")):
        run_ranks(2, lambda world: _torch(world, other if world.rank else _trained))


@pytest.mark.parametrize(
    "one, other",
    [
        *((each, each) for each in (_without, _frozen, _checkpointed, _reversible, _twice)),
        *((_trained, other) for other in (_scale_frozen, _empty, _checkpointed)),
        (_reversible, _stored), (_evaluated, _evaluated),
    ],
)  # fmt: skip
def test_programs_that_go_well(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    run_ranks(2, lambda world: _torch(world, other if world.rank else one))


def _link_trained(chainer: Any, link: Any, x: Any) -> None:
    chainer.functions.sum(link(x) ** 2).backward()


def _link_without(chainer: Any, link: Any, x: Any) -> None:
    with chainer.no_backprop_mode():
        link(x)


def _link_forgets(chainer: Any, link: Any, x: Any) -> None:
    from multibn.chainer_backend import forget

    chainer.functions.sum(forget(link, x) ** 2).backward()


def test_a_gradient_on_one_rank_only_in_chainer() -> None:
    name = "MultiNodeBatchNormalization "
    with pytest.raises(RuntimeError, match=(WITH + WITHOUT).format(name)):
        run_ranks(2, lambda world: _chainer(world, (_link_trained, _link_without)[world.rank]))


@pytest.mark.parametrize(
    "one, other",
    [
        (_link_without, _link_without),
        (_link_forgets, _link_forgets),
        (_link_trained, _link_forgets),
    ],
)
def test_chains_that_go_well(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    run_ranks(2, lambda world: _chainer(world, other if world.rank else one))
