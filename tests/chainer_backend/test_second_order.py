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
from multibn.parity.oracle import relative_error
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
    assert counting.take() == [2 * C + 2] * 2
    chainer.grad([F.sum(dx**2)], [x])
    assert set(counting.take()) == {2 * C + 2, 2 * C}


class Graph:
    """A random graph of one to three calls, in a row or side by side, of ranks with few samples."""

    def __init__(self, seed: int, num_ranks: int) -> None:
        self.seed = seed
        rng = np.random.default_rng([seed, num_ranks])
        self.sizes = rng.integers(1, 4, num_ranks)
        if num_ranks > 2:
            self.sizes[rng.integers(2, num_ranks)] = rng.integers(0, 2)
        shape = (sum(self.sizes), C, *[1, 1] * rng.integers(2))
        self.x, self.target = rng.normal(size=(2, *shape))
        self.gammas = rng.normal(1, 0.3, (3, C))
        self.mask = np.ones(len(self.x), bool)
        self.mask[0] = rng.random() < 0.5 or self.sizes[0] == 1
        self.masked_ranks = rng.choice([0, 1, num_ranks], p=[0.4, 0.3, 0.3])

    def loss(self, x: Any, target: Any, batch_norm: Any, has_more_nodes: bool) -> Any:
        """The sum of the outputs of all calls. One rank's graph may be deeper than another's."""
        rng = np.random.default_rng(self.seed)
        values = [x]
        for call in range(rng.integers(1, 4)):
            v, residual = (values[i] for i in rng.integers(len(values), size=2))
            v = F.tanh(v) if rng.random() < 0.5 else v
            v = v * 1.0 if rng.random() < 0.5 and has_more_nodes else v
            has_residual, relu = rng.random(2) < 0.3
            values.append(batch_norm(call, v, residual if has_residual else None, relu))
        return sum(F.sum(F.sin(values[i]) * target) for i in rng.permutation(range(1, len(values))))

    def gradients(
        self, part: slice, batch_norm: Any, gammas: list[Any], has_more_nodes: bool
    ) -> list[Any]:
        """Gradients of three orders of a part of the batch, and those of the last of parameters."""
        x, target = chainer.Variable(self.x[part]), self.target[part]
        value, found = self.loss(x, target, batch_norm, has_more_nodes), []
        for _ in range(3):
            (dx,) = chainer.grad([value], [x], enable_double_backprop=True)
            found.append(dx.array)
            value = F.sum(dx * dx * target)
        value.backward()
        return [*found, x.grad, *(gamma.grad for gamma in gammas)]

    def on_rank(self, world: Communicator) -> list[Any]:
        """Gradients by links that share statistics."""
        end = sum(self.sizes[: world.rank + 1])
        part = slice(end - self.sizes[world.rank], end)
        links = [MultiNodeBatchNormalization(C, world, eps=0.1, dtype="d") for _ in range(3)]
        for link, gamma in zip(links, self.gammas, strict=True):
            link.gamma.array[:] = gamma
            link.cleargrads()
        mask = self.mask[part].reshape(-1, *[1] * (self.x.ndim - 2))

        def batch_norm(call: int, v: Any, residual: Any, relu: bool) -> Any:
            link = links[call]
            link.fuse_relu = relu
            return link(v, residual=residual, mask=mask if self.masked_ranks > world.rank else None)

        gammas = [link.gamma for link in links]
        return self.gradients(part, batch_norm, gammas, self.sizes[world.rank] > 1)

    def expected(self, rank: int) -> list[Any]:
        """The rank's part of the gradients of the whole batch, by Chainer's own functions."""
        gammas = [chainer.Variable(gamma) for gamma in self.gammas]
        weights = self.mask if self.masked_ranks else np.ones(len(self.x))
        weights = weights.astype(float).reshape(-1, *[1] * (self.x.ndim - 1))

        def mean(v: Any) -> Any:
            rows = F.sum(v * np.broadcast_to(weights, v.shape), 0, keepdims=True)
            return F.broadcast_to(rows / weights.sum(), v.shape)

        def batch_norm(call: int, v: Any, residual: Any, relu: bool) -> Any:
            d = v - mean(v)
            gamma = F.reshape(gammas[call], (C, *[1] * (v.ndim - 2)))
            y = d / (mean(d * d) + 0.1) ** 0.5 * F.broadcast_to(gamma, v.shape)
            y = y if residual is None else y + residual
            return (F.relu(y) if relu else y) * np.broadcast_to(weights, v.shape)

        *found, _, _, _ = found_all = self.gradients(slice(None), batch_norm, gammas, True)
        parts = [np.split(v, np.cumsum(self.sizes))[rank] for v in found]
        means = [None if g is None else g / len(self.sizes) for g in found_all[-3:]]
        return parts + means

    def compare(self, world: Communicator) -> None:
        """Compare this rank's numbers, once all communication is over."""
        found = self.on_rank(world)
        for i, (got, want) in enumerate(zip(found, self.expected(world.rank), strict=True)):
            assert (got is None) == (want is None)
            if got is not None and got.size:
                assert relative_error(got, want) < 1e-8, (self.seed, i)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_of_ranks_with_one_sample_are_one_process(seed: int) -> None:
    """The order of the messages depends on no rank's shapes, where Chainer's depths do."""
    ranks = 2 + seed % 2
    run_ranks(ranks, Graph(seed, ranks).compare)


@pytest.mark.parametrize("of_gradients, phase", [(False, "second order"), (True, "gradient")])
def test_messages_of_other_links_are_an_error_on_all(of_gradients: bool, phase: str) -> None:
    """Their lengths agree, so that their sum would be a silent wrong number."""

    def check(communicator: Communicator) -> None:
        x, _ = data(2)
        variables = [chainer.Variable(x) for _ in "ab"]
        values = [ours(v, None, None, communicator) for v in variables]
        if of_gradients:
            values = chainer.grad(values, variables, [x, x], enable_double_backprop=True)
        mine = slice(communicator.rank, communicator.rank + 1)
        with pytest.raises(RuntimeError, match=rf"different places: .*\({phase}, float64"):
            chainer.grad(values[mine], variables[mine], [x], enable_double_backprop=True)

    run_ranks(2, check)
