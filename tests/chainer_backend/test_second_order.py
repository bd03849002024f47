"""The link differentiated twice, over ranks as threads: against one process.

There, batch normalization is composed of Chainer's own differentiable functions.
"""

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
X, DY = np.random.default_rng(2).normal(1, 2, (2, 5, C, 2))


def link_of(communicator: Any, gamma: Any = None, beta: Any = None) -> Any:
    options: Any = {"eps": 0.1, "use_gamma": False, "use_beta": False}
    link = MultiNodeBatchNormalization(C, communicator, **options)
    link.gamma, link.beta = gamma, beta
    return link


def test_a_graph_takes_one_message_more() -> None:
    """A graph takes one message more; without one nothing changes."""
    counting = CountingCommunicator(SingleProcess())
    link = MultiNodeBatchNormalization(C, counting, dtype=np.float64)
    x = chainer.Variable(X)
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
        self.sizes = rng.integers(1, 4, num_ranks) if num_ranks > 1 else np.array([4])
        if num_ranks > 2:
            self.sizes[rng.integers(2, num_ranks)] = rng.integers(0, 2)
        shape = (sum(self.sizes), C, *[1, 1] * rng.integers(2))
        self.x, self.target = rng.normal(size=(2, *shape))
        self.mask = np.ones(len(self.x), bool)
        self.mask[0] = rng.random() < 0.5 or self.sizes[0] == 1
        self.masked_ranks = rng.choice([0, 1, num_ranks], p=[0.4, 0.3, 0.3])
        # Three calls' gammas, then their betas; some have none.
        drawn = rng.normal([[1]] * 3 + [[0]] * 3, 0.3, (6, C))
        self.parameters = [v if rng.random() < 0.8 else None for v in drawn]

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
        self, part: slice, batch_norm: Any, parameters: Any, has_more_nodes: bool, ranks: int = 1
    ) -> list[Any]:
        """Gradients of three orders of a part of the batch, and the last ones of parameters.

        A link's are means over the ranks. Without links they are sums of so many `ranks`.
        """
        x, target = chainer.Variable(self.x[part]), self.target[part]
        value, found = self.loss(x, target, batch_norm, has_more_nodes), []
        there = [p for p in parameters if p is not None]
        for _ in range(3):
            dx, *others = chainer.grad([value], [x, *there], enable_double_backprop=True)
            found.append(dx.array)
            penalties = [F.sum(F.sin(g / ranks)) for g in others if g is not None]
            value = F.sum(dx * dx * target) + ranks * sum(penalties)
        value.backward()
        of_parameters = [None if p.grad is None else p.grad / ranks for p in there]
        return [*found, x.grad, *of_parameters]

    def on_rank(self, world: Communicator) -> list[Any]:
        """Gradients by links that share statistics."""
        end = sum(self.sizes[: world.rank + 1])
        part = slice(end - self.sizes[world.rank], end)
        parameters = [None if v is None else chainer.Variable(v) for v in self.parameters]
        links = [link_of(world, *parameters[call::3]) for call in range(3)]
        mask = self.mask[part].reshape(-1, *[1] * (self.x.ndim - 2))

        def batch_norm(call: int, v: Any, residual: Any, relu: bool) -> Any:
            link = links[call]
            link.fuse_relu = relu
            return link(v, residual=residual, mask=mask if self.masked_ranks > world.rank else None)

        return self.gradients(part, batch_norm, parameters, self.sizes[world.rank] > 1)

    def expected(self, rank: int) -> list[Any]:
        """The rank's part of the gradients of the whole batch, by Chainer's own functions."""
        parameters = [None if v is None else chainer.Variable(v) for v in self.parameters]
        weights = self.mask if self.masked_ranks else np.ones(len(self.x))
        weights = weights.astype(float).reshape(-1, *[1] * (self.x.ndim - 1))

        def mean(v: Any) -> Any:
            rows = F.sum(v * np.broadcast_to(weights, v.shape), 0, keepdims=True)
            return F.broadcast_to(rows / weights.sum(), v.shape)

        def batch_norm(call: int, v: Any, residual: Any, relu: bool) -> Any:
            gamma, beta = (
                missing if p is None else F.broadcast_to(F.reshape(p, (C, *v.shape[2:])), v.shape)
                for p, missing in zip(parameters[call::3], (1.0, 0.0), strict=True)
            )
            d = v - mean(v)
            y = d / (mean(d * d) + 0.1) ** 0.5 * gamma + beta
            y = y if residual is None else y + residual
            return (F.relu(y) if relu else y) * np.broadcast_to(weights, v.shape)

        ranks = len(self.sizes)
        found = self.gradients(slice(None), batch_norm, parameters, True, ranks)
        return [np.split(v, np.cumsum(self.sizes))[rank] for v in found[:4]] + found[4:]

    def compare(self, world: Communicator) -> None:
        """Compare this rank's numbers, once all communication is over."""
        found = self.on_rank(world)
        for i, (got, want) in enumerate(zip(found, self.expected(world.rank), strict=True)):
            assert (got is None) == (want is None)
            if got is not None and got.size:
                assert relative_error(got, want) < 1e-8, (self.seed, i)


@pytest.mark.parametrize("seed", range(18))
def test_random_graphs_of_ranks_with_one_sample_are_one_process(seed: int) -> None:
    """The order of the messages depends on no rank's shapes, where Chainer's depths do."""
    ranks = 1 + seed % 3
    run_ranks(ranks, Graph(seed, ranks).compare)


@pytest.mark.parametrize("of_gradients, phase", [(False, "second order"), (True, "gradient")])
def test_messages_of_other_links_are_an_error_on_all(of_gradients: bool, phase: str) -> None:
    """Their lengths agree, so that their sum would be a silent wrong number."""

    def check(communicator: Communicator) -> None:
        variables = [chainer.Variable(X) for _ in "ab"]
        values = [link_of(communicator)(v) for v in variables]
        if of_gradients:
            values = chainer.grad(values, variables, [X, X], enable_double_backprop=True)
        mine = slice(communicator.rank, communicator.rank + 1)
        with pytest.raises(RuntimeError, match=rf"different places: .*\({phase}, float64"):
            chainer.grad(values[mine], variables[mine], [X], enable_double_backprop=True)

    run_ranks(2, check)
