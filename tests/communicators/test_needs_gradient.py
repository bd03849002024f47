"""Ranks of which one alone would send a backward message: an error in the forward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts
from multibn.torch_backend.reversible import ReversibleSequence
from tests.helpers.ranks import ThreadCommunicator, run_ranks

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

NEEDS = "torch chainer"

TOLD = (
    r"rank\(s\) \[0\] in {0} \(forward, float32, call 1\), with gradients; "
    r"rank\(s\) \[1\] in {0} \(forward, float32, call 1\), without gradients\. Ranks with "
)


def _learn(y: Any) -> None:
    (y**2).sum().backward()


def _without(first: Any, bn: Any, x: Any) -> None:
    with torch.no_grad():
        bn(first(x))


def _scale_frozen(first: Any, bn: Any, x: Any) -> None:
    bn.weight.requires_grad_(False)
    _learn(bn(first(x)))


def _checkpointed(first: Any, bn: Any, x: Any) -> None:
    options: Any = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    _learn(checkpoint(lambda x: bn(first(x)), x.requires_grad_(), **options))


def _reversible(first: Any, bn: Any, x: Any, mode: Any = "reversible") -> None:
    y = first(x)
    _learn(sum(ReversibleSequence([(bn, nn.Identity())], mode=mode)(y, y)))


def _twice(first: Any, bn: Any, x: Any) -> None:
    x.requires_grad_()
    (dx,) = torch.autograd.grad((bn(first(x)) ** 2).sum(), x, create_graph=True)
    _learn(dx)


PROGRAMS: dict[str, Callable[..., object]] = {
    "trained": lambda first, bn, x: _learn(bn(first(x))),
    "frozen": lambda first, bn, x: _learn(bn(first.requires_grad_(False)(x))),
    "without": _without,
    "scale frozen": _scale_frozen,
    "empty": lambda first, bn, x: _learn(bn(first(x[:0]))),
    "checkpointed": _checkpointed,
    "reversible": _reversible,
    "stored": lambda first, bn, x: _reversible(first, bn, x, "stored"),
    "twice": _twice,
    "evaluated": lambda first, bn, x: bn.eval()(first(x)),
}


def _torch(world: ThreadCommunicator, *programs: str) -> None:
    """Run the program of this rank: the first, or on rank 1 the last."""
    torch.manual_seed(0)
    first, bn = nn.Linear(3, 4), SyncBatchNorm(4, process_group=world)
    PROGRAMS[programs[-world.rank]](first, bn, torch.randn(5, 3))


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


def _link_without(link: Any, x: Any) -> None:
    with chainer.no_backprop_mode():
        link(x)


def _link_forgets(link: Any, x: Any) -> None:
    F.sum(F.forget(link, x) ** 2).backward()


def _link_finetunes(link: Any, x: Any) -> None:
    F.sum(link(x, finetune=True) ** 2).backward()


CHAINS: dict[str, Callable[..., object]] = {
    "trained": lambda link, x: F.sum(link(x) ** 2).backward(),
    "without": _link_without,
    "forgets": _link_forgets,
    "finetunes": _link_finetunes,
}


def _chainer(world: ThreadCommunicator, *chains: str) -> None:
    link = MultiNodeBatchNormalization(4, world)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("f")
    CHAINS[chains[-world.rank]](link, x)


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
