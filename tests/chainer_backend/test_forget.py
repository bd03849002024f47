"""Links in blocks of F.forget, which run twice: their averages move once, their numbers stay."""

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F

from multibn.chainer_backend import MultiNodeBatchNormalization
from tests.helpers.ranks import ThreadCommunicator, run_ranks

C = 3


def plainly(func: Any, *xs: Any) -> Any:
    return func(*xs)


class Net(chainer.Chain):
    def __init__(self, communicator: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.a = MultiNodeBatchNormalization(C, communicator, dtype=np.float64)
            self.b = MultiNodeBatchNormalization(C, communicator, dtype=np.float64)
            self.W = chainer.Parameter(np.eye(C) + 0.3)


# Blocks of links `a` and `b`, which are given how to forget.
def twice_in_a_block(net: Any, how: Any, x: Any) -> Any:
    return how(lambda v: net.a(F.tanh(net.b(net.a(v)))), x)


def in_several_blocks(net: Any, how: Any, x: Any) -> Any:
    for _ in range(3):
        x = how(lambda v: F.tanh(net.b(net.a(v) @ net.W)), x)
    return x


def nested(net: Any, how: Any, x: Any) -> Any:
    def inner(v: Any) -> Any:
        return net.a(F.tanh(net.b(v)))

    return how(lambda v: net.b(how(inner, net.a(v)) ** 2), x)


def never_recomputed(net: Any, how: Any, x: Any) -> Any:
    how(lambda v: net.a(v * 2), x)
    with chainer.no_backprop_mode():
        how(net.b, x)
    return how(lambda v: net.a(v, finetune=True), x)


def run(block: Any, how: Any, communicator: Any, x: Any) -> list[Any]:
    """The numbers of a step."""
    net = Net(communicator)
    v = chainer.Variable(x)
    y = block(net, how, v)
    F.sum(y**3).backward()
    kept = [net.a.avg_mean, net.a.avg_var, net.a.N, net.b.avg_mean, net.b.avg_var]
    return [y.array, v.grad, *kept, *(p.grad for _, p in sorted(net.namedparams()))]


@pytest.mark.parametrize("block", [twice_in_a_block, in_several_blocks, nested, never_recomputed])
def test_forgetting_gives_the_numbers_of_the_run_without(block: Callable[..., Any]) -> None:
    """Rank 1 has no data."""

    def rank(world: ThreadCommunicator) -> None:
        x = np.random.default_rng(world.rank).normal(size=(0 if world.rank == 1 else 4, C))
        found, expected = (run(block, how, world, x) for how in (F.forget, plainly))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, want)

    run_ranks(1, rank)
    run_ranks(3, rank)
