"""Ranks of which one alone would send a backward message: an error in the forward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks

TOLD = (
    r"rank\(s\) \[0\] in {0} \(forward, float32, call 1\), with gradients; "
    r"rank\(s\) \[1\] in {0} \(forward, float32, call 1\), without gradients\. Those with "
)


def _learn(y: Any) -> None:
    (y**2).sum().backward()


def _without(torch: Any, first: Any, bn: Any, x: Any) -> None:
    with torch.no_grad():
        bn(first(x))


def _scale_frozen(torch: Any, first: Any, bn: Any, x: Any) -> None:
    bn.weight.requires_grad_(False)
    _learn(bn(first(x)))


def _checkpointed(torch: Any, first: Any, bn: Any, x: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    from multibn.torch_backend import checkpoint_contexts

    options: Any = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    _learn(checkpoint(lambda x: bn(first(x)), x.requires_grad_(), **options))


def _reversible(torch: Any, first: Any, bn: Any, x: Any, mode: Any = "reversible") -> None:
    from multibn.torch_backend.reversible import ReversibleSequence

    y = first(x)
    _learn(sum(ReversibleSequence([(bn, torch.nn.Identity())], mode=mode)(y, y)))


def _twice(torch: Any, first: Any, bn: Any, x: Any) -> None:
    x.requires_grad_()
    (dx,) = torch.autograd.grad((bn(first(x)) ** 2).sum(), x, create_graph=True)
    _learn(dx)


PROGRAMS: dict[str, Callable[..., object]] = {
    "trained": lambda torch, first, bn, x: _learn(bn(first(x))),
    "frozen": lambda torch, first, bn, x: _learn(bn(first.requires_grad_(False)(x))),
    "without": _without,
    "scale frozen": _scale_frozen,
    "empty": lambda torch, first, bn, x: _learn(bn(first(x[:0]))),
    "checkpointed": _checkpointed,
    "reversible": _reversible,
    "stored": lambda torch, first, bn, x: _reversible(torch, first, bn, x, "stored"),
    "twice": _twice,
    "evaluated": lambda torch, first, bn, x: bn.eval()(first(x)),
}


def _torch(world: ThreadCommunicator, *programs: str) -> None:
    """Run the program of this rank: the first, or on rank 1 the last."""
    require.need("torch")
    import torch
    from torch import nn

    from multibn.torch_backend import SyncBatchNorm

    torch.manual_seed(0)
    first, bn = nn.Linear(3, 4), SyncBatchNorm(4, process_group=world)
    PROGRAMS[programs[-world.rank]](torch, first, bn, torch.randn(5, 3))


@pytest.mark.parametrize("other", ["frozen", "without"])
def test_a_gradient_on_one_rank_only_is_told(other: str) -> None:
    with pytest.raises(RuntimeError, match=TOLD.format("SyncBatchNorm")):
        run_ranks(2, lambda world: _torch(world, "trained", other))


@pytest.mark.parametrize(
    "programs",
    [
        *[(each,) for each in ("without", "frozen", "checkpointed", "reversible", "twice")],
        *[("trained", other) for other in ("scale frozen", "empty", "checkpointed")],
        *[("reversible", "stored"), ("evaluated",)],
    ],
    ids=" and ".join,
)
def test_programs_that_go_well(programs: tuple[str, ...]) -> None:
    run_ranks(2, lambda world: _torch(world, *programs))


def _link_without(chainer: Any, link: Any, x: Any) -> None:
    with chainer.no_backprop_mode():
        link(x)


def _link_forgets(chainer: Any, link: Any, x: Any) -> None:
    F = chainer.functions
    F.sum(F.forget(link, x) ** 2).backward()


def _link_finetunes(chainer: Any, link: Any, x: Any) -> None:
    chainer.functions.sum(link(x, finetune=True) ** 2).backward()


CHAINS: dict[str, Callable[..., object]] = {
    "trained": lambda chainer, link, x: chainer.functions.sum(link(x) ** 2).backward(),
    "without": _link_without,
    "forgets": _link_forgets,
    "finetunes": _link_finetunes,
}


def _chainer(world: ThreadCommunicator, *chains: str) -> None:
    require.need("chainer")
    from multibn.chainer_backend import MultiNodeBatchNormalization, compat

    compat.make_importable()
    import chainer

    link = MultiNodeBatchNormalization(4, world)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("f")
    CHAINS[chains[-world.rank]](chainer, link, x)


def test_a_gradient_on_one_rank_only_is_told_in_chainer() -> None:
    with pytest.raises(RuntimeError, match=TOLD.format("MultiNodeBatchNormalization")):
        run_ranks(2, lambda world: _chainer(world, "trained", "without"))


def test_finetuning_on_one_rank_only_is_told() -> None:
    told = (
        r"the ranks are in different places: rank\(s\) \[0\] in .* \(forward, float32, call 1\); "
        r"rank\(s\) \[1\] in .* \(forward, float32, finetune=True, call 1\)\. All ranks must run"
    )
    with pytest.raises(RuntimeError, match=told):
        run_ranks(2, lambda world: _chainer(world, "trained", "finetunes"))


@pytest.mark.parametrize("chain", ["without", "forgets", "finetunes"])
def test_chains_that_go_well(chain: str) -> None:
    run_ranks(2, lambda world: _chainer(world, chain))
