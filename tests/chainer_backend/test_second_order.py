"""The link differentiated twice, over ranks as threads: against one process.

There, batch normalization is composed of Chainer's own differentiable functions.
"""

from functools import partial
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F

from multibn import SingleProcess
from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.communicators import Communicator
from tests.helpers.ranks import CountingCommunicator, run_ranks

C = 3
SIZES = (3, 0, 5)  # of the ranks' batches
EPS = 1e-3


def data(rank: int, dtype: Any = np.float64) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank)
    shape = (SIZES[rank], C, 2)
    return rng.normal(1, 2, shape).astype(dtype), rng.normal(size=shape).astype(dtype)


def composed(x: Any, gamma: Any, beta: Any) -> Any:
    def wide(v: Any) -> Any:
        return F.broadcast_to(F.reshape(v, (1, C, 1)), x.shape)

    centred = x - wide(F.mean(x, (0, 2)))
    y = centred / (wide(F.mean(centred**2, (0, 2))) + EPS) ** 0.5
    y = y if gamma is None else y * wide(gamma)
    return y if beta is None else y + wide(beta)


def ours(x: Any, gamma: Any, beta: Any, comm: Any = None) -> Any:
    options: Any = {"eps": EPS, "use_gamma": False, "use_beta": False}
    link = MultiNodeBatchNormalization(C, comm or SingleProcess(), **options)
    link.gamma, link.beta = gamma, beta
    return link(x)


def second_order(batch_norm: Any, x: Any, target: Any, gamma: Any, beta: Any) -> list[Any]:
    """Gradients of a loss with a gradient penalty, of inputs and of parameters."""
    variables = [chainer.Variable(a) for a in (x, gamma, beta)]
    y = batch_norm(*variables)
    loss = F.sum(F.tanh(y) * target)
    dx, dgamma, dbeta = chainer.grad([loss], variables, enable_double_backprop=True)
    penalty = F.sum(dx * dx * target) + F.sum(F.sin(dgamma)) + F.sum(dbeta**3) + loss
    gradients = chainer.grad([penalty], variables)
    return [v.array for v in (dx, dgamma, dbeta, *gradients)]


def whole(gamma: Any, beta: Any, ranks: int) -> list[Any]:
    """Numbers of one process that stand for what all ranks together compute."""
    parts = [data(r) for r in range(ranks)]
    x, target = (np.concatenate(a) for a in zip(*parts, strict=True))
    variables = [chainer.Variable(a) for a in (x, gamma, beta)]
    y = composed(*variables)
    loss = F.sum(F.tanh(y) * target)
    dx, dgamma, dbeta = chainer.grad([loss], variables, enable_double_backprop=True)
    # each rank adds its loss; parameters' gradients are means
    per_rank = F.sum(F.sin(dgamma / ranks)) + F.sum((dbeta / ranks) ** 3)
    penalty = F.sum(dx * dx * target) + ranks * per_rank + loss
    gx, ggamma, gbeta = chainer.grad([penalty], variables)
    parameters = [v / ranks for v in (dgamma, dbeta, ggamma, gbeta)]
    return [v.array for v in (dx, *parameters[:2], gx, *parameters[2:])]


def parameters(dtype: Any = np.float64) -> tuple[Any, Any]:
    rng = np.random.default_rng(9)
    return rng.normal(1, 0.3, C).astype(dtype), rng.normal(0, 0.3, C).astype(dtype)


def compare_with_one_process(world: Communicator) -> None:
    """Compare this rank's numbers, once all communication is over."""
    gamma, beta = parameters()
    found = second_order(partial(ours, comm=world), *data(world.rank), gamma, beta)
    expected = whole(gamma, beta, world.size)
    stops = np.cumsum(SIZES[: world.size])[:-1]
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        part = np.split(want, stops)[world.rank] if i in (0, 3) else want
        np.testing.assert_allclose(got, part, rtol=1e-9, atol=1e-11, err_msg=str(i))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_one_process_on_the_whole_batch(size: int) -> None:
    run_ranks(size, compare_with_one_process)


@pytest.mark.parametrize("has_gamma, has_beta", [(True, True), (False, False), (True, False)])
def test_three_orders_equal_composed_functions(has_gamma: bool, has_beta: bool) -> None:
    gamma, beta = parameters()
    x, target = data(2)
    results: list[list[Any]] = []
    for function in (composed, ours):
        variables = [chainer.Variable(a) for a in (x, *[gamma] * has_gamma, *[beta] * has_beta)]
        given = (variables[1] if has_gamma else None, variables[-1] if has_beta else None)
        value = F.sum(F.tanh(function(variables[0], *given)) * target)
        results.append([])
        for _ in range(3):
            grads = chainer.grad([value], variables, enable_double_backprop=True)
            value = sum(F.sum(g**2) for g in grads)
            results[-1] += [g.array for g in grads]
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_first_order_is_the_same_with_a_graph() -> None:
    for dtype, rtol in ((np.float64, 1e-11), (np.float32, 1e-5), (np.float16, 1e-2)):
        x, dy = data(2, dtype)
        gamma, beta = parameters(np.float32 if dtype == np.float16 else dtype)
        results = []
        for enable in (False, True):
            variables = [chainer.Variable(a) for a in (x, gamma, beta)]
            grads = chainer.grad([ours(*variables)], variables, [dy], enable_double_backprop=enable)
            assert [g.dtype for g in grads] == [v.dtype for v in variables]
            results.append([g.array.astype(np.float64) for g in grads])
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_a_graph_takes_one_message_more() -> None:
    """A graph takes one message more; without one nothing changes."""
    counting = CountingCommunicator(SingleProcess())
    link = MultiNodeBatchNormalization(C, counting, dtype=np.float64)
    x = chainer.Variable(data(2)[0])
    loss = F.sum(F.tanh(link(x)))
    assert counting.take() == [2 * C + 2]
    loss.backward()
    assert counting.take() == [2 * C]
    (dx,) = chainer.grad([loss], [x], enable_double_backprop=True)
    assert counting.take() == [3 * C, 2 * C]  # of gamma, too
    chainer.grad([F.sum(dx**2)], [x])
    assert set(counting.take()) == {3 * C, 2 * C}
