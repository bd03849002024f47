"""Chainer's function differentiated twice, against one process with the whole batch.

There, batch normalization is composed of Chainer's own differentiable functions.
"""

from typing import Any

import numpy as np

from multibn.chainer_backend import multi_node_batch_normalization
from multibn.communicators import Communicator

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

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
    var = wide(F.mean(centred**2, (0, 2)))
    return centred / (var + EPS) ** 0.5 * wide(gamma) + wide(beta)


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

    def ours(*args: Any) -> Any:
        return multi_node_batch_normalization(*args, comm=world, eps=EPS)[0]

    found = second_order(ours, *data(world.rank), gamma, beta)
    expected = whole(gamma, beta, world.size)
    stops = np.cumsum(SIZES[: world.size])[:-1]
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        part = np.split(want, stops)[world.rank] if i in (0, 3) else want
        np.testing.assert_allclose(got, part, rtol=1e-9, atol=1e-11, err_msg=str(i))
