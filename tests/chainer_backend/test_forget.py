"""Forgotten blocks of Chainer links: one message forward, none again, one backward; one update."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from tests.helpers import require
from tests.helpers.ranks import CountingCommunicator, ThreadCommunicator, run_ranks

require.need("chainer")

from multibn.chainer_backend import (  # noqa: E402
    MultiNodeBatchNormalization,
    forget,
    multi_node_batch_normalization,
)

import chainer  # noqa: E402  # isort: skip (multibn makes it importable)
from chainer import functions as F  # noqa: E402  # isort: skip

C = 3
FORWARD, BACKWARD = 2 * C + 2, 2 * C


def plainly(func: Any, *xs: Any) -> Any:
    return func(*xs)


class Net(chainer.Chain):
    def __init__(self, communicator: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.a = MultiNodeBatchNormalization(C, communicator, dtype=np.float64)
            self.b = MultiNodeBatchNormalization(C, communicator, dtype=np.float64)
            self.W = chainer.Parameter(np.eye(C) + 0.3)


# Blocks of links `a` and `b`; each is given how to forget, and says how often links are called.
def once(net: Any, how: Any, x: Any) -> tuple[Any, int]:
    return how(net.a, x), 1


def twice_in_a_block(net: Any, how: Any, x: Any) -> tuple[Any, int]:
    return how(lambda v: net.a(F.tanh(net.b(net.a(v)))), x), 3


def in_several_blocks(net: Any, how: Any, x: Any) -> tuple[Any, int]:
    for _ in range(3):
        x = how(lambda v: F.tanh(net.b(net.a(v) @ net.W)), x)
    return x, 6


def nested(net: Any, how: Any, x: Any) -> tuple[Any, int]:
    def inner(v: Any) -> Any:
        return net.a(F.tanh(net.b(v)))

    return how(lambda v: net.b(how(inner, net.a(v)) ** 2), x), 4


def never_recomputed(net: Any, how: Any, x: Any) -> tuple[Any, int]:
    how(lambda v: net.a(v * 2), x)
    with chainer.no_backprop_mode():
        how(net.b, x)
    return how(net.a, x), 3


BLOCKS = [once, twice_in_a_block, in_several_blocks, nested, never_recomputed]


def run(block: Any, how: Any, communicator: Any, x: Any) -> Any:
    """Numbers of a step, and the messages of its forward and backward pass."""
    counting = CountingCommunicator(communicator)
    net = Net(counting)
    v = chainer.Variable(x)
    y, calls = block(net, how, v)
    forward = counting.take()
    F.sum(y**3).backward()
    kept = [net.a.avg_mean, net.a.avg_var, net.b.avg_mean, net.b.avg_var]
    gradients = [p.grad for _, p in sorted(net.namedparams())]
    return [y.array, v.grad, *kept, *gradients], forward, counting.take(), calls


def assert_alike(found: Any, expected: Any, how: Any) -> None:
    numbers, forward, backward, _ = found
    expected_numbers, *messages, _ = expected
    assert forward == messages[0]
    # Chainer's own block sends its forward messages again.
    assert how is F.forget or backward == messages[1]
    for got, want in zip(numbers, expected_numbers, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("how", [forget, F.forget])
@pytest.mark.parametrize("block", BLOCKS)
def test_forgetting_gives_the_numbers_of_the_run_without(
    block: Callable[..., Any], how: Any
) -> None:
    x = np.random.default_rng(0).normal(size=(5, C))
    found, expected = (run(block, each, SingleProcess(), x) for each in (how, plainly))
    assert_alike(found, expected, how)
    _, forward, backward, calls = expected
    assert forward == [FORWARD] * calls
    assert set(backward) == {BACKWARD}


@pytest.mark.parametrize("how", [forget, F.forget])
def test_forgetting_is_exact_over_ranks_with_an_empty_one(how: Any) -> None:
    """Rank 1 has no data; ranks keep their own tapes."""

    def rank(world: ThreadCommunicator) -> Any:
        x = np.random.default_rng(world.rank).normal(size=(0 if world.rank == 1 else 4, C))
        return [run(in_several_blocks, h, world, x) for h in (how, plainly)]

    for found, expected in run_ranks(3, rank):
        assert_alike(found, expected, how)


@pytest.mark.parametrize("kinds", list(itertools.product([forget, F.forget], repeat=3)))
def test_blocks_of_both_kinds_can_be_nested(kinds: Any) -> None:
    def block(net: Any, how: Any, x: Any) -> tuple[Any, int]:
        outer, middle, inner = [plainly] * 3 if how is plainly else kinds

        def within(v: Any) -> Any:
            return net.a(inner(net.b, v) * 2)

        return outer(lambda v: net.b(middle(within, v * 2) ** 2), x), 3

    x = np.random.default_rng(0).normal(size=(5, C))
    found, expected = (run(block, each, SingleProcess(), x) for each in (forget, plainly))
    assert_alike(found, expected, F.forget if F.forget in kinds else forget)


@pytest.mark.parametrize("how", [forget, F.forget])
def test_a_second_backward_pass_adds_the_same_gradient(how: Any) -> None:
    counting = CountingCommunicator(SingleProcess())
    link = MultiNodeBatchNormalization(C, counting, dtype=np.float64)
    x = chainer.Variable(np.random.default_rng(0).normal(size=(4, C)))
    y = F.sum(how(link, x) ** 3)
    y.backward()
    once = x.grad.copy()
    y.backward()
    np.testing.assert_allclose(x.grad, 2 * once)
    again = [FORWARD] if how is F.forget else []
    assert counting.take() == [FORWARD, *again, BACKWARD, *again, BACKWARD]


@pytest.mark.parametrize("comm", [None, SingleProcess()])
def test_the_function_can_be_forgotten(comm: Any) -> None:
    """Its communicator is made of `comm` anew in each pass."""
    gradients = []
    for how in (forget, F.forget, plainly):
        x = chainer.Variable(np.random.default_rng(0).normal(size=(4, C)))
        y = how(lambda v: multi_node_batch_normalization(v, comm=comm)[0], x)
        F.sum(y**3).backward()
        gradients.append(x.grad)
    for got in gradients[:2]:
        np.testing.assert_array_equal(got, gradients[2])


def test_one_input_has_the_moments_of_each_of_two_groups() -> None:
    """Local moments are the same, those of the groups are not."""

    def rank(world: ThreadCommunicator) -> Any:
        net = [
            MultiNodeBatchNormalization(C, c, dtype=np.float64) for c in (world, SingleProcess())
        ]
        found = []
        for how in (forget, F.forget, plainly):
            x = chainer.Variable(np.random.default_rng(world.rank).normal(size=(4, C)))
            F.sum(how(lambda v: net[0](v) * net[1](v), x) ** 2).backward()
            found.append(x.grad)
        return found

    for *got, expected in run_ranks(2, rank):
        for gradient in got:
            np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def test_finetuning_counts_once() -> None:
    for how in (forget, F.forget):
        link = MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float64)
        x = chainer.Variable(np.random.default_rng(0).normal(size=(4, C)))
        F.sum(how(lambda v, link=link: link(v, finetune=True), x)).backward()
        assert link.N == 1
        np.testing.assert_allclose(link.avg_mean, x.array.mean(0))


def test_a_block_may_have_several_arguments_and_results() -> None:
    link = MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float64)
    x = np.random.default_rng(0).normal(size=(4, C))
    a, b = forget(lambda v, w: (link(v), link(v + w)), x, 2 * x)
    F.sum(a * b).backward()
    np.testing.assert_allclose(b.array, link(3 * x).array)


def test_a_block_that_differs_is_an_error() -> None:
    factors = iter([1.0, 2.0])
    link = MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float64)
    x = np.random.default_rng(0).normal(size=(4, C))

    def block(v: Any) -> Any:
        for _ in range(int(next(factors))):
            v = link(3.5 * v)
        return v

    y = forget(block, x)
    with pytest.raises(RuntimeError, match="more batch norms than the first"):
        F.sum(y).backward()
